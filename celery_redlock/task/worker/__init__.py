"""A worker's main process: forced ends, lost children, tasks that wait."""
