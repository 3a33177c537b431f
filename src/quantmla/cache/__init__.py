"""Where tokens live: page bytes, which representation a query reads, and what that costs."""
