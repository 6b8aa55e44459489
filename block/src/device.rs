//! A device, and devices made at run time from a target's name.

use std::pin::Pin;
use std::rc::Rc;

use crate::{Abilities, Geometry, Operation, Outcome};

/// Something that stores blocks.
///
/// A device may rely on the gate in front of it: requests are in range, within its limits, of its shape, and of a kind it
/// lists as native.
pub trait Device {
    /// Its shape.
    fn geometry(&self) -> &Geometry;

    /// What it does itself.
    fn abilities(&self) -> Abilities;

    /// Carries out one request. Several may be under way at once; their order is open unless a Flush stands between.
    fn execute(&self, operation: Operation) -> impl Future<Output = Outcome>;
}

/// [`Device`] behind a pointer, for stacks that are put together at run time.
pub trait DynDevice {
    /// Its shape.
    fn geometry(&self) -> &Geometry;

    /// What it does itself.
    fn abilities(&self) -> Abilities;

    /// Carries out one request.
    fn execute<'a>(&'a self, operation: Operation) -> Pin<Box<dyn Future<Output = Outcome> + 'a>>;
}

impl<D: Device> DynDevice for D {
    fn geometry(&self) -> &Geometry {
        Device::geometry(self)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(self)
    }

    fn execute<'a>(&'a self, operation: Operation) -> Pin<Box<dyn Future<Output = Outcome> + 'a>> {
        Box::pin(Device::execute(self, operation))
    }
}

/// A device of a kind that is known only at run time. Clones are the same device.
#[derive(Clone)]
pub struct Stack(Rc<dyn DynDevice>);

impl Stack {
    /// Hides the kind of `device`.
    pub fn new(device: impl Device + 'static) -> Stack {
        Stack(Rc::new(device))
    }
}

impl Device for Stack {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    fn execute(&self, operation: Operation) -> impl Future<Output = Outcome> {
        self.0.execute(operation)
    }
}

impl<D: Device> Device for Rc<D> {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&**self)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&**self)
    }

    fn execute(&self, operation: Operation) -> impl Future<Output = Outcome> {
        Device::execute(&**self, operation)
    }
}
