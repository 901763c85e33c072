"""What a model still knows of what it should forget, and of everything else: the metrics of TOFU, MUSE and WMDP."""
