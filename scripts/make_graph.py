"""Makes `graph.onnx`, the small committed graph of the embedded engine. Needs the `onnx` package (development only).

Run: `python scripts/make_graph.py [out.onnx]`. The graph holds no weights: every large initializer is declared as
external data, and the engine hands the arrays over in memory. Operators in the `com.microsoft` domain are documented in
ONNX Runtime's `docs/ContribOperators.md`.

Inputs: ids (rows, steps) int64; lengths (rows,) int32, tokens of each row after this pass minus one; total () int32,
the largest of them plus one; keep (1,) int64, how many last steps to give logits for; past_<layer>_{key,value}
(rows, kv_heads, capacity, head_dim). Outputs: logits (rows, keep, vocabulary); present_* (the same memory as past_*).
"""

from __future__ import annotations

import sys
from pathlib import Path

from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, save

from toprope.servers.model.engines.embedded import weights
from toprope.servers.model.engines.embedded.weights import SMOLLM2_135M, Shape

OUT = Path(weights.__file__).with_name("graph.onnx")
CONTRIB = "com.microsoft"


class Builder:
    """Collects nodes and initializers while the graph is written down in order."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def external(self, name: str, shape: tuple[int, ...]) -> str:
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", "memory"
        self.constants.append(tensor)
        return name

    def integers(self, name: str, values: list[int]) -> str:
        self.constants.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: object) -> str:
        node = helper.make_node(kind, inputs, outputs, domain=domain)
        node.attribute.extend(_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return outputs[0]


def _attribute(key: str, value: object) -> AttributeProto:
    return helper.make_attribute(key, value)


def make(shape: Shape) -> ModelProto:
    """The whole model."""
    b = Builder()
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    cosine = b.external("rope_cosine", (shape.context, shape.head_dim // 2))
    sine = b.external("rope_sine", (shape.context, shape.head_dim // 2))
    table = b.external("embedding", (shape.vocabulary, shape.hidden))
    stream = b.node("Gather", [table, "ids"], ["hidden_0"])
    pending = ""
    for i in range(shape.layers):
        norm = b.external(f"attention_norm_{i}", (shape.hidden,))
        stream, normed = _add_and_norm(b, stream, pending, norm, f"a{i}", shape.epsilon)
        qkv = b.node("MatMul", [normed, b.external(f"qkv_{i}", (shape.hidden, width))], [f"qkv_out_{i}"])
        caches = [f"past_{i}_key", f"past_{i}_value", "lengths", "total", cosine, sine]
        attended = b.node(
            "GroupQueryAttention",
            [qkv, "", "", *caches],
            [f"attended_{i}", f"present_{i}_key", f"present_{i}_value"],
            CONTRIB,
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
        )
        out = b.external(f"attention_out_{i}", (shape.heads * shape.head_dim, shape.hidden))
        pending = b.node("MatMul", [attended, out], [f"attention_delta_{i}"])
        norm = b.external(f"ffn_norm_{i}", (shape.hidden,))
        stream, normed = _add_and_norm(b, stream, pending, norm, f"f{i}", shape.epsilon)
        both = b.node("MatMul", [normed, b.external(f"gate_up_{i}", (shape.hidden, 2 * shape.inner))], [f"both_{i}"])
        b.node("Split", [both], [f"gate_{i}", f"up_{i}"], axis=-1, num_outputs=2)
        b.node("QuickGelu", [f"gate_{i}"], [f"silu_{i}"], CONTRIB, alpha=1.0)
        b.node("Mul", [f"silu_{i}", f"up_{i}"], [f"inner_{i}"])
        down = b.external(f"down_{i}", (shape.inner, shape.hidden))
        pending = b.node("MatMul", [f"inner_{i}", down], [f"ffn_delta_{i}"])
    last = b.external("final_norm", (shape.hidden,))
    _, normed = _add_and_norm(b, stream, pending, last, "last", shape.epsilon)
    b.node("Neg", ["keep"], ["first_kept"])
    b.node("Slice", [normed, "first_kept", b.integers("far", [2**31 - 1]), b.integers("axis", [1])], ["kept"])
    b.node("Reshape", ["kept", b.integers("flat", [-1, shape.hidden])], ["kept_flat"])
    b.node("Gemm", ["kept_flat", table], ["logits_flat"], transB=1)
    b.node("Shape", ["kept"], ["kept_shape"], start=0, end=2)
    b.node("Concat", ["kept_shape", b.integers("vocabulary", [shape.vocabulary])], ["logits_shape"], axis=0)
    b.node("Reshape", ["logits_flat", "logits_shape"], ["logits"])
    return _model(b, shape)


def _add_and_norm(b: Builder, stream: str, delta: str, norm: str, tag: str, epsilon: float) -> tuple[str, str]:
    """(stream + delta, its root-mean-square norm); without a delta the stream itself is normed."""
    if not delta:
        b.node("SimplifiedLayerNormalization", [stream, norm], [f"normed_{tag}"], axis=-1, epsilon=epsilon)
        return stream, f"normed_{tag}"
    outputs = [f"normed_{tag}", "", "", f"stream_{tag}"]
    b.node("SkipSimplifiedLayerNormalization", [stream, delta, norm], outputs, CONTRIB, epsilon=epsilon)
    return f"stream_{tag}", f"normed_{tag}"


def _model(b: Builder, shape: Shape) -> ModelProto:
    cache = ["rows", shape.kv_heads, "capacity", shape.head_dim]

    def caches(when: str) -> list[ValueInfoProto]:
        names = [f"{when}_{i}_{part}" for i in range(shape.layers) for part in ("key", "value")]
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, cache) for name in names]

    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["rows", "steps"]),
        helper.make_tensor_value_info("lengths", TensorProto.INT32, ["rows"]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
        helper.make_tensor_value_info("keep", TensorProto.INT64, [1]),
        *caches("past"),
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", "kept", shape.vocabulary])
    graph = helper.make_graph(b.nodes, "smollm2-135m", inputs, [logits, *caches("present")], b.constants)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9, producer_name="toprope")
    return model


def main(out: Path) -> None:
    model = make(SMOLLM2_135M)
    save(model, out)
    print(f"{out}: {out.stat().st_size} bytes, {len(model.graph.node)} nodes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
