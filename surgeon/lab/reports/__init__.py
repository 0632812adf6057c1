"""Reports on an output: inspect, routing, transport, and one page of everything."""
