//! A device, and devices made at run time from a target's name.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::{Abilities, Geometry, Outcome, Request};

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
    fn execute(&self, operation: Request) -> impl Future<Output = Outcome>;

    /// Carries a request out in place, for a device that has nothing to wait for; `None`, with nothing done, when it is to
    /// go through [`Device::execute`]. Saves callers with many small requests the future of each.
    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        let _ = operation;
        None
    }
}

/// A device of a kind that is known only at run time. Clones are the same device.
///
/// The futures of its requests live on the heap and are used again, so that in the long run a request allocates nothing.
#[derive(Clone)]
pub struct DynDevice(Rc<dyn Hidden>);

impl DynDevice {
    /// Hides the kind of `device`.
    pub fn new(device: impl Device + 'static) -> DynDevice {
        DynDevice(Rc::new(ErasedDevice { device: Rc::new(device), idle: RefCell::default() }))
    }
}

impl Device for DynDevice {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    fn execute(&self, operation: Request) -> impl Future<Output = Outcome> {
        let runner = self.0.runner();
        runner.desk.operation.set(Some(operation));
        ExecuteFuture { home: &*self.0, runner: Some(runner) }
    }

    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        self.0.try_execute(operation)
    }
}

/// How many futures that are not in use a stack keeps.
const IDLE_LIMIT: usize = 256;

/// A device without its kind.
trait Hidden {
    fn geometry(&self) -> &Geometry;
    fn abilities(&self) -> Abilities;
    fn try_execute(&self, operation: &Request) -> Option<Outcome>;
    fn runner(&self) -> PooledFuture;
    fn put_back(&self, runner: PooledFuture);
}

/// A device and the futures that wait for its next requests.
struct ErasedDevice<D> {
    device: Rc<D>,
    idle: RefCell<Vec<PooledFuture>>,
}

/// A future that carries out one request after the other, and the place where it finds and leaves them.
struct PooledFuture {
    desk: Rc<Handoff>,
    future: Pin<Box<dyn Future<Output = ()>>>,
}

#[derive(Default)]
struct Handoff {
    operation: Cell<Option<Request>>,
    outcome: Cell<Option<Outcome>>,
}

async fn serve(device: Rc<impl Device>, desk: Rc<Handoff>) {
    loop {
        let operation = poll_fn(|_| desk.operation.take().map_or(Poll::Pending, Poll::Ready)).await;
        let outcome = device.execute(operation).await;
        desk.outcome.set(Some(outcome));
    }
}

impl<D: Device + 'static> Hidden for ErasedDevice<D> {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.device.abilities()
    }

    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        self.device.try_execute(operation)
    }

    fn runner(&self) -> PooledFuture {
        let idle = self.idle.borrow_mut().pop();
        idle.unwrap_or_else(|| {
            let desk = Rc::new(Handoff::default());
            let future = Box::pin(serve(Rc::clone(&self.device), Rc::clone(&desk)));
            PooledFuture { desk, future }
        })
    }

    fn put_back(&self, runner: PooledFuture) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < IDLE_LIMIT {
            idle.push(runner);
        }
    }
}

/// One request. Dropped early, it takes its future along, and so ends what the device had begun.
struct ExecuteFuture<'a> {
    home: &'a dyn Hidden,
    runner: Option<PooledFuture>,
}

impl Future for ExecuteFuture<'_> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let runner = self.runner.as_mut().expect("not polled after its end");
        // The future itself has no end.
        let _ = runner.future.as_mut().poll(cx);
        let Some(outcome) = runner.desk.outcome.take() else { return Poll::Pending };
        if let Some(runner) = self.runner.take() {
            self.home.put_back(runner);
        }
        Poll::Ready(outcome)
    }
}

impl<D: Device> Device for Rc<D> {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&**self)
    }

    fn abilities(&self) -> Abilities {
        Device::abilities(&**self)
    }

    fn execute(&self, operation: Request) -> impl Future<Output = Outcome> {
        Device::execute(&**self, operation)
    }

    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        Device::try_execute(&**self, operation)
    }
}
