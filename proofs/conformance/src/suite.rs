//! The tests.

mod identify;

use crate::bench::Bench;

/// A test.
pub struct Case {
    /// Its name, for the command line.
    pub name: &'static str,
    /// What it shows, in a line.
    pub about: &'static str,
    /// The oldest kernel that can do it, and the one that no longer can, by major and minor version.
    pub kernels: (Version, Version),
    /// The test.
    pub run: fn(&mut Bench<'_>) -> anyhow::Result<()>,
}

type Version = (u32, u32);
/// Every kernel.
const ANY: (Version, Version) = ((0, 0), (u32::MAX, 0));

impl Case {
    /// Whether a kernel of this version can do it.
    pub fn runs_on(&self, version: Version) -> bool {
        self.kernels.0 <= version && version < self.kernels.1
    }
}

/// All tests, in the order in which they run.
pub const CASES: &[Case] = &[Case {
    name: "identify",
    about: "discovery, what controllers and namespaces say, log pages",
    kernels: ANY,
    run: identify::run,
}];

/// Their names.
pub fn names() -> Vec<&'static str> {
    CASES.iter().map(|case| case.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_case_runs_on_some_kernel() {
        for (i, case) in CASES.iter().enumerate() {
            assert!(CASES[..i].iter().all(|other| other.name != case.name), "{}", case.name);
            assert!([(6, 1), (7, 2)].iter().any(|version| case.runs_on(*version)), "{}", case.name);
        }
    }
}
