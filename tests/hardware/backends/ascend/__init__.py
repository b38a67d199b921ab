"""Tests of the Ascend platform: against torch_npu's published signatures, and with a stand-in for torch_npu."""
