"""The package ``horovod`` in processes that hvdkitrun --as-horovod started."""

if __name__ == "horovod":
    from hvdkit.as_horovod import install

    install()
