//! What something that is open is called, where that may change: a mirror has another name when it has other members.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::TargetName;

/// A name that all who have a clone share, on any core.
#[derive(Clone, Debug)]
pub struct TargetLabel(Arc<Mutex<TargetName>>);

impl TargetLabel {
    /// What was opened by this name.
    pub fn new(target: &TargetName) -> TargetLabel {
        TargetLabel(Arc::new(Mutex::new(target.clone())))
    }

    /// The name that it has now.
    pub fn now(&self) -> TargetName {
        self.lock().clone()
    }

    /// Has it be called so from now on.
    pub fn set(&self, target: &TargetName) {
        self.lock().clone_from(target);
    }

    /// Whether it is called so.
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
    fn a_name_is_everybodys() {
        let [old, new] = ["mirror:a,b", "mirror:a,c"].map(|text| text.parse::<TargetName>().unwrap());
        let called = TargetLabel::new(&old);
        let elsewhere = called.clone();
        assert!(elsewhere.is(&old));
        called.set(&new);
        assert_eq!((elsewhere.to_string().as_str(), elsewhere.is(&old)), ("mirror:a,c", false));
    }
}
