"""This process: forks, signals that are held back, mutexes, loggers."""
