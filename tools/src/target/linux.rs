//! Which paths name a Linux device that may take offloaded work.
//!
//! By name only: whether it is there, and what it can do, is found out when it is opened. Partitions are ordinary block
//! devices, since the kernel takes no passthrough commands through them.

/// Whether the path is `/dev/nvmeXnY`, `/dev/ngXnY` or `/dev/sdX`.
pub(super) fn is_device(path: &str) -> bool {
    let Some(name) = path.strip_prefix("/dev/") else { return false };
    let namespace = name.strip_prefix("nvme").or_else(|| name.strip_prefix("ng"));
    let is_namespace = namespace.and_then(|rest| rest.split_once('n')).is_some_and(|(x, y)| number(x) && number(y));
    let is_disk = name.strip_prefix("sd").is_some_and(|x| !x.is_empty() && x.bytes().all(|b| b.is_ascii_lowercase()));
    is_namespace || is_disk
}

fn number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_devices_are_recognised_and_nothing_else() {
        for path in ["/dev/nvme0n1", "/dev/nvme12n34", "/dev/ng0n1", "/dev/sda", "/dev/sdaa"] {
            assert!(is_device(path), "{path}");
        }
        for path in
            ["/dev/nvme0", "/dev/nvme0n1p1", "/dev/ng0", "/dev/sda1", "/dev/sd", "/dev/shm/v", "/dev/vda", "sda"]
        {
            assert!(!is_device(path), "{path}");
        }
    }
}
