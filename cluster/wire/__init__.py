"""The control protocol: typed messages, their MessagePack codec, and authenticated duplex streams."""
