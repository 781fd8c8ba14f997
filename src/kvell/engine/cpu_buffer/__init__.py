"""Pages in host memory: preempted requests, cached prefixes, prompts that go ahead."""
