//! NVMe/TCP without sockets.
