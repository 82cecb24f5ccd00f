"""Pipeline schedules as plain data, without torch: which there are, their files, their errors, their bubbles."""
