//! The options of `fs mount`, as `mount` has them: a list with commas.

use std::str::FromStr;
use std::time::Duration;

/// The interval of commits, as short as it is for programs that never sync.
const COMMIT_INTERVAL: Duration = Duration::from_secs(5);
/// The longest one, in seconds.
const MAX_COMMIT_S: u64 = 300;

/// How a filesystem is mounted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MountOptions {
    /// For changes.
    pub writes: bool,
    /// After this time changes are committed.
    pub commit_interval: Duration,
    /// Devices are told what becomes free.
    pub discards: bool,
    /// What becomes zeroes counts as written, in files that are not copied on write.
    pub zeroes_are_written: bool,
    /// The kernel passes on each write before it returns.
    pub writes_through: bool,
    /// Device nodes take effect.
    pub allows_devices: bool,
    /// Set-user-ID bits take effect.
    pub allows_set_id: bool,
    /// Other users may use it.
    pub allow_other: bool,
}

impl FromStr for MountOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<MountOptions, String> {
        let mut has_interval = false;
        let mut options = MountOptions {
            writes: false,
            commit_interval: COMMIT_INTERVAL,
            discards: false,
            zeroes_are_written: false,
            writes_through: false,
            allows_devices: false,
            allows_set_id: false,
            allow_other: false,
        };
        // Later ones override earlier ones.
        for option in text.split(',') {
            match option {
                "rw" => options.writes = true,
                "ro" => options.writes = false,
                "discard" => options.discards = true,
                "nodiscard" => options.discards = false,
                "zero_range=written" => options.zeroes_are_written = true,
                "zero_range=unwritten" => options.zeroes_are_written = false,
                "writethrough" => options.writes_through = true,
                "dev" => options.allows_devices = true,
                "nodev" => options.allows_devices = false,
                "suid" => options.allows_set_id = true,
                "nosuid" => options.allows_set_id = false,
                "allow_other" => options.allow_other = true,
                _ => {
                    options.commit_interval = commit_interval(option)?;
                    has_interval = true;
                }
            }
        }
        let for_changes = [
            (options.discards, "discard"),
            (options.zeroes_are_written, "zero_range"),
            (options.writes_through, "writethrough"),
            (options.allows_devices, "dev"),
            (options.allows_set_id, "suid"),
            (has_interval, "commit"),
        ];
        match for_changes.into_iter().find(|(is_set, _)| *is_set && !options.writes) {
            Some((_, name)) => Err(format!("{name} is only for mounts with rw")),
            None => Ok(options),
        }
    }
}

/// The interval in `commit=SECONDS`.
fn commit_interval(option: &str) -> Result<Duration, String> {
    let Some(seconds) = option.strip_prefix("commit=") else {
        return Err(format!(
            "{option:?} is not an option; they are ro, rw, commit=SECONDS, [no]discard, zero_range=written|unwritten, \
             writethrough, [no]dev, [no]suid and allow_other"
        ));
    };
    let in_range = seconds.parse().ok().filter(|seconds| (1..=MAX_COMMIT_S).contains(seconds));
    in_range.map(Duration::from_secs).ok_or_else(|| format!("commit must be 1 to {MAX_COMMIT_S} seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_the_list_and_later_ones_count() {
        let of = |text: &str| text.parse::<MountOptions>();
        let plain = of("ro").unwrap();
        assert_eq!((plain.writes, plain.commit_interval), (false, COMMIT_INTERVAL));
        let all = of("ro,rw,commit=30,discard,zero_range=written,writethrough,dev,suid,allow_other").unwrap();
        assert!(
            all.writes
                && all.discards
                && all.zeroes_are_written
                && all.writes_through
                && all.allows_devices
                && all.allow_other
        );
        assert_eq!((all.commit_interval, all.allows_set_id), (Duration::from_secs(30), true));
        assert_eq!(
            of("rw,discard,dev,zero_range=written,suid,ro,nodiscard,nodev,zero_range=unwritten,nosuid"),
            Ok(plain)
        );
        for (bad, why) in [
            ("", "not an option"),
            ("rw,", "not an option"),
            ("commit=0", "1 to 300"),
            ("commit=301", "1 to 300"),
            ("commit=x", "1 to"),
            ("commit=3", "commit is only for mounts with rw"),
            ("rw,discard,ro", "discard is only"),
            ("zero_range=written", "zero_range is only"),
            ("rw,zero_range=maybe", "not an option"),
            ("writethrough", "writethrough is only"),
            ("suid", "suid is only"),
            ("ro,dev", "dev is only"),
        ] {
            assert!(of(bad).unwrap_err().contains(why), "{bad}");
        }
    }
}
