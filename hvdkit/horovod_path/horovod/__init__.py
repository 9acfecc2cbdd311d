"""Found in place of Horovod where hvdkitrun --as-horovod started the process."""

if __name__ == "horovod":
    from hvdkit.as_horovod import install

    install()
