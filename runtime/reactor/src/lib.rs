//! One reactor per core over io_uring, with a plain-syscall fallback.
