"""The engine: steps a scheduler and an executor, and turns events into outputs.

To read in order: engine, loop, async_engine, messages, outputs, input_processor.
"""
