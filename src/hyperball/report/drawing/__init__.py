"""Pictures as inline SVG and PNG."""
