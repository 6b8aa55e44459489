//! What a server says of the device behind a namespace or export, for comparison with what other servers say.

use std::sync::{Arc, Mutex, PoisonError};

/// The identities that a server lists: that of its device, as long as it has it open, and those of all devices at other servers that this
/// one lies on. As of the last connection; clones are the same list, on every core.
#[derive(Clone, Debug, Default)]
pub struct ListedIdentities(Arc<Mutex<Vec<[u8; 16]>>>);

impl ListedIdentities {
    /// A list that is read on a first connection.
    pub fn new(listed: Vec<[u8; 16]>) -> ListedIdentities {
        ListedIdentities(Arc::new(Mutex::new(listed)))
    }

    /// The list now.
    pub fn get(&self) -> Vec<[u8; 16]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the list: the server may have opened its device anew.
    pub fn set(&self, listed: Vec<[u8; 16]>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = listed;
    }
}

impl PartialEq for ListedIdentities {
    fn eq(&self, other: &ListedIdentities) -> bool {
        self.get() == other.get()
    }
}

impl Eq for ListedIdentities {}
