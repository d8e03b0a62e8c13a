"""How fast one router process is: real streams, a real client, scripted engines. See `__main__`."""
