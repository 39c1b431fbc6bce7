"""What runs came to, side by side: rows, tables and figures. Computed from metrics, and so from traces."""
