"""A back-end that is vLLM in this process, with one resumable request for each run."""
