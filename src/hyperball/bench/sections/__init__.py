"""What is compared: each section is a module with `cases(setting)` and `notes(setting)`."""
