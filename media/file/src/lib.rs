//! Files and block devices as media and as raw devices.
