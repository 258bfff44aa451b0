"""Tools for whoever runs it: command line, inspection, demo. Nothing below imports them."""
