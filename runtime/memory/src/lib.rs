//! Aligned buffers that can be registered with io_uring.
