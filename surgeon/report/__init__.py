"""What can be shown of an output: inspect, routing, transport, and one page of everything."""
