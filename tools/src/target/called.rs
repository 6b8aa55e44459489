//! The name of an open target, which may change: a mirror with other replicas has another name.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::TargetName;

/// A name that all clones share, on any core.
#[derive(Clone, Debug)]
pub struct TargetLabel(Arc<Mutex<TargetName>>);

impl TargetLabel {
    /// The name of a target that was opened by this name.
    pub fn new(target: &TargetName) -> TargetLabel {
        TargetLabel(Arc::new(Mutex::new(target.clone())))
    }

    /// The name that it has now.
    pub fn now(&self) -> TargetName {
        self.lock().clone()
    }

    /// Changes the name.
    pub fn set(&self, target: &TargetName) {
        self.lock().clone_from(target);
    }

    /// True if this is the name now.
    pub fn is(&self, target: &TargetName) -> bool {
        *self.lock() == *target
    }

    fn lock(&self) -> MutexGuard<'_, TargetName> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for TargetLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_clones_have_one_name() {
        let [old, new] = ["mirror:a,b", "mirror:a,c"].map(|text| text.parse::<TargetName>().unwrap());
        let called = TargetLabel::new(&old);
        let elsewhere = called.clone();
        assert!(elsewhere.is(&old));
        called.set(&new);
        assert_eq!((elsewhere.to_string().as_str(), elsewhere.is(&old)), ("mirror:a,c", false));
    }
}
