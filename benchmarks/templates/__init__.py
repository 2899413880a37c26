"""An oracle for chat masks: what published chat templates write, and what of it is to be trained."""
