"""The embedded target server: the part of SGLang's protocol that Eyas uses, on a CPU."""
