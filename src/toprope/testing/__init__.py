"""What authors of back ends and environments test with: scripted engine, conformance suites."""
