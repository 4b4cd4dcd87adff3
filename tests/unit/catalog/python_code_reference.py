"""A solution of each problem of `python_code`, written to be right and not to be fast. Nothing of it is shipped."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations, permutations, product


def running_total(numbers):
    return [sum(numbers[: end + 1]) for end in range(len(numbers))]


def second_largest(numbers):
    distinct = sorted(set(numbers))
    if len(distinct) < 2:
        raise ValueError("there is none")
    return distinct[-2]


def is_palindrome(text):
    kept = [letter.lower() for letter in text if letter.isalnum()]
    return kept == kept[::-1]


def count_vowels(text):
    return sum(letter in "aeiou" for letter in text.lower())


def caesar(text, shift):
    def moved(letter):
        if not (letter.isascii() and letter.isalpha()):
            return letter
        base = ord("A") if letter.isupper() else ord("a")
        return chr((ord(letter) - base + shift) % 26 + base)

    return "".join(map(moved, text))


def run_lengths(text):
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs


def balanced(text):
    pairs, stack = {")": "(", "]": "[", "}": "{"}, []
    for letter in text:
        if letter in "([{":
            stack.append(letter)
        elif letter in pairs and (not stack or stack.pop() != pairs[letter]):
            return False
    return not stack


def to_roman(number):
    signs = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")]
    signs += [(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    written = ""
    for worth, sign in signs:
        while number >= worth:
            written, number = written + sign, number - worth
    return written


def from_roman(text):
    worth = dict(zip("IVXLCDM", (1, 5, 10, 50, 100, 500, 1000), strict=True))
    values = [worth[letter] for letter in text]
    return sum(-v if any(v < after for after in values[i + 1 : i + 2]) else v for i, v in enumerate(values))


def prime_factors(number):
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def primes_below(limit):
    return [n for n in range(2, limit) if all(n % d for d in range(2, int(n**0.5) + 1))]


def greatest_common_divisor(a, b):
    a, b = abs(a), abs(b)
    while b:
        a, b = b, a % b
    return a


def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def transpose(matrix):
    return [list(row) for row in zip(*matrix, strict=True)]


def rotate_clockwise(matrix):
    return [list(row) for row in zip(*matrix[::-1], strict=True)]


def spiral(matrix):
    rows, seen = [list(row) for row in matrix], []
    while rows:
        seen += rows.pop(0)
        rows = [list(row) for row in zip(*rows, strict=True)][::-1]
    return seen


def multiply_matrices(a, b):
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def merge_intervals(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def word_counts(text):
    return dict(Counter(re.findall(r"[a-z]+", text.lower())))


def group_anagrams(words):
    groups = {}
    for word in words:
        groups.setdefault("".join(sorted(word)), []).append(word)
    return sorted(sorted(group) for group in groups.values())


def longest_common_prefix(words):
    if not words:
        return ""
    length = 0
    while all(len(word) > length and word[length] == words[0][length] for word in words):
        length += 1
    return words[0][:length]


def longest_increasing(numbers):
    best = [1] * len(numbers)
    for i, number in enumerate(numbers):
        best[i] = 1 + max((best[j] for j in range(i) if numbers[j] < number), default=0)
    return max(best, default=0)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def coin_change(coins, amount):
    fewest = [0] + [None] * amount
    for value in range(1, amount + 1):
        before = [fewest[value - coin] for coin in coins if coin <= value and fewest[value - coin] is not None]
        fewest[value] = min(before) + 1 if before else None
    return -1 if fewest[amount] is None else fewest[amount]


def two_sum(numbers, target):
    for i, j in combinations(range(len(numbers)), 2):
        if numbers[i] + numbers[j] == target:
            return [i, j]
    return None


def evaluate_postfix(tokens):
    stack = []
    for token in tokens:
        if token in "+-*":
            b, a = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b}[token])
        else:
            stack.append(int(token))
    if len(stack) != 1:
        raise ValueError("malformed")
    return stack[0]


def to_base(number, base):
    digits, sign, number = "", "-" * (number < 0), abs(number)
    while number or not digits:
        digits, number = "0123456789abcdefghijklmnopqrstuvwxyz"[number % base] + digits, number // base
    return sign + digits


def flatten(value):
    return [leaf for item in value for leaf in flatten(item)] if isinstance(value, list) else [value]


def deep_get(data, path):
    for part in path.split("."):
        if not isinstance(data, dict) or part not in data:
            raise KeyError(path)
        data = data[part]
    return data


def is_leap_year(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def day_of_year(year, month, day):
    months = [31, 28 + is_leap_year(year), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    return sum(months[: month - 1]) + day


def clock_add(time, minutes):
    total = (int(time[:2]) * 60 + int(time[3:]) + minutes) % 1440
    return f"{total // 60:02d}:{total % 60:02d}"


def shortest_path(edges, start, goal):
    neighbours = {}
    for a, b in edges:
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    reached, edge, steps = {start}, {start}, 0
    while edge:
        if goal in edge:
            return steps
        edge = {near for node in edge for near in neighbours.get(node, ())} - reached
        reached, steps = reached | edge, steps + 1
    return -1


def topological_order(depends):
    done = []
    while len(done) < len(depends):
        ready = [name for name in sorted(depends) if name not in done and all(d in done for d in depends[name])]
        if not ready:
            raise ValueError("a cycle")
        done.append(ready[0])
    return done


def knapsack(items, capacity):
    worths = [0]
    for size in range(1, len(items) + 1):
        for chosen in combinations(items, size):
            if sum(weight for weight, _ in chosen) <= capacity:
                worths.append(sum(worth for _, worth in chosen))
    return max(worths)


def life_step(board):
    high, wide = len(board), len(board[0])

    def alive(r, c):
        near = [(r + dr, c + dc) for dr, dc in product((-1, 0, 1), repeat=2) if (dr, dc) != (0, 0)]
        count = sum(board[y][x] for y, x in near if 0 <= y < high and 0 <= x < wide)
        return int(count == 3 or (count == 2 and board[r][c]))

    return [[alive(r, c) for c in range(wide)] for r in range(high)]


def median(numbers):
    ordered, half = sorted(numbers), len(numbers) // 2
    return ordered[half] if len(numbers) % 2 else (ordered[half - 1] + ordered[half]) / 2


def next_permutation(numbers):
    later = sorted({p for p in permutations(numbers) if list(p) > numbers})
    return list(later[0]) if later else sorted(numbers)


def parse_query(text):
    found = {}
    for part in text.split("&"):
        if part:
            key, _, value = part.partition("=")
            found.setdefault(key, []).append(value)
    return found


def compare_versions(a, b):
    left, right = ([int(part) for part in text.split(".")] for text in (a, b))
    length = max(len(left), len(right))
    left, right = (part + [0] * (length - len(part)) for part in (left, right))
    return (left > right) - (left < right)
