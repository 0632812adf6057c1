"""What planners know of grafts, and how the file is composed and joined that ships with them."""
