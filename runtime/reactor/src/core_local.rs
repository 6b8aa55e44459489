//! Values that stay on their core while handles to them travel.
//!
//! Invariants: the value is used and dropped on its home thread only: by its reactor when the last handle goes, or at the
//! latest when the reactor ends. A handle that is elsewhere can do nothing but send work home.

use std::any::Any;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use crate::executor;
use crate::post::CoreAddress;

/// The values that live on one reactor, by the number of their handles.
#[derive(Default)]
pub(crate) struct CoreLocals {
    next: u64,
    values: HashMap<u64, Rc<dyn Any>>,
}

/// A handle to a value that lives on one core. It may be sent and shared, although the value may not. Clones are for the
/// same value.
pub struct CoreLocal<T> {
    place: Arc<Place>,
    // The value is never reached through a handle on another thread.
    _value: PhantomData<fn() -> T>,
}

struct Place {
    home: CoreAddress,
    number: u64,
}

impl<T: 'static> CoreLocal<T> {
    /// Makes this reactor the home of `value`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(value: Rc<T>) -> CoreLocal<T> {
        let core = executor::current();
        let mut homed = core.homed.borrow_mut();
        let number = homed.next;
        homed.next += 1;
        homed.values.insert(number, value);
        drop(homed);
        CoreLocal { place: Arc::new(Place { home: CoreAddress::here(), number }), _value: PhantomData }
    }

    /// The value, if the caller runs on its home and that has not ended.
    pub fn get(&self) -> Option<Rc<T>> {
        let core = executor::try_current()?;
        if !self.place.home.is_here() {
            return None;
        }
        let value = core.homed.borrow().values.get(&self.place.number).cloned()?;
        value.downcast().ok()
    }

    /// Where the value lives.
    pub fn home(&self) -> &CoreAddress {
        &self.place.home
    }
}

impl<T> Clone for CoreLocal<T> {
    fn clone(&self) -> CoreLocal<T> {
        CoreLocal { place: Arc::clone(&self.place), _value: PhantomData }
    }
}

impl<T> std::fmt::Debug for CoreLocal<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Homed").field("home", &self.place.home).field("number", &self.place.number).finish()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let number = self.number;
        if self.home.is_here() {
            return evict(number);
        }
        // A home that stops gives up all its values by itself.
        let _ = self.home.send(move || evict(number));
    }
}

/// Drops a value of the current reactor.
fn evict(number: u64) {
    let value = executor::try_current().and_then(|core| core.homed.borrow_mut().values.remove(&number));
    drop(value);
}
