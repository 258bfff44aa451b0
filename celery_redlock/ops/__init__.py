"""Tools for operators: command line, web page, doctor, demo. Nothing below imports them."""
