"""What finished cells leave: records that are kept, numbers over seeds, tables of text and of Markdown."""
