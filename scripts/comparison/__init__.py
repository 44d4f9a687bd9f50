"""The comparison of the designs: workloads, who drives them, and the report."""
