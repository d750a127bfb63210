"""What people look at: tables and the page."""
