//! Devices: the trait, devices whose type is known only at run time, and openers of devices.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use futures_util::future::LocalBoxFuture;

use crate::{Abilities, Error, Geometry, Outcome, Request};

/// Something that stores blocks.
///
/// A device may rely on the gate in front of it: requests are in range, within its limits, fit its geometry, and are of a kind
/// that it lists as native.
pub trait Device {
    /// The geometry; it does not change while the device is open.
    fn geometry(&self) -> &Geometry;

    /// What the device executes itself.
    fn abilities(&self) -> Abilities;

    /// Executes one request. Several may be in flight at once, in any order; a Flush covers the writes that completed before it
    /// started.
    fn execute(&self, request: Request) -> impl Future<Output = Outcome>;

    /// Executes a request in place if the device need not wait for anything; `None` if the request was not started and has to go
    /// through [`Device::execute`]. This saves a future per small request.
    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let _ = request;
        None
    }
}

/// A device whose type is known only at run time. Clones are the same device.
///
/// The futures of its requests are boxed and reused, so that a request allocates nothing in the long run.
#[derive(Clone)]
pub struct DynDevice(Rc<dyn ObjectSafeDevice>);

impl DynDevice {
    /// Erases the type of `device`.
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

    fn execute(&self, request: Request) -> impl Future<Output = Outcome> {
        let future = self.0.take_future();
        future.handoff.request.set(Some(request));
        ExecuteFuture { device: &*self.0, future: Some(future) }
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        self.0.try_execute(request)
    }
}

/// Maximum idle futures that a device keeps.
const IDLE_LIMIT: usize = 256;

/// The methods of [`Device`] that need no type.
trait ObjectSafeDevice {
    fn geometry(&self) -> &Geometry;
    fn abilities(&self) -> Abilities;
    fn try_execute(&self, request: &Request) -> Option<Outcome>;
    fn take_future(&self) -> PooledFuture;
    fn put_back(&self, future: PooledFuture);
}

/// A device and its idle futures.
struct ErasedDevice<D> {
    device: Rc<D>,
    idle: RefCell<Vec<PooledFuture>>,
}

/// A future that executes one request after the other, and the place where it takes requests and leaves outcomes.
struct PooledFuture {
    handoff: Rc<Handoff>,
    future: Pin<Box<dyn Future<Output = ()>>>,
}

#[derive(Default)]
struct Handoff {
    request: Cell<Option<Request>>,
    outcome: Cell<Option<Outcome>>,
}

async fn serve(device: Rc<impl Device>, handoff: Rc<Handoff>) {
    loop {
        let request = poll_fn(|_| handoff.request.take().map_or(Poll::Pending, Poll::Ready)).await;
        let outcome = device.execute(request).await;
        handoff.outcome.set(Some(outcome));
    }
}

impl<D: Device + 'static> ObjectSafeDevice for ErasedDevice<D> {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.device.abilities()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        self.device.try_execute(request)
    }

    fn take_future(&self) -> PooledFuture {
        let idle = self.idle.borrow_mut().pop();
        idle.unwrap_or_else(|| {
            let handoff = Rc::new(Handoff::default());
            let future = Box::pin(serve(Rc::clone(&self.device), Rc::clone(&handoff)));
            PooledFuture { handoff, future }
        })
    }

    fn put_back(&self, future: PooledFuture) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < IDLE_LIMIT {
            idle.push(future);
        }
    }
}

/// The future of one request. If it is dropped early, it drops its pooled future too, which cancels the request.
struct ExecuteFuture<'a> {
    device: &'a dyn ObjectSafeDevice,
    future: Option<PooledFuture>,
}

impl Future for ExecuteFuture<'_> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let pooled = self.future.as_mut().expect("not polled after its end");
        // `serve` never returns.
        let _ = pooled.future.as_mut().poll(cx);
        let Some(outcome) = pooled.handoff.outcome.take() else { return Poll::Pending };
        if let Some(pooled) = self.future.take() {
            self.device.put_back(pooled);
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

    fn execute(&self, request: Request) -> impl Future<Output = Outcome> {
        Device::execute(&**self, request)
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        Device::try_execute(&**self, request)
    }
}

/// Opens a device, again each time a layer has lost it. Clones open the same device.
///
/// Dropping a device that was opened closes it; a caller that has to close devices cleanly keeps the handles for that itself.
#[derive(Clone)]
pub struct DeviceOpener {
    name: Rc<str>,
    open: Rc<dyn Fn() -> LocalBoxFuture<'static, Result<DynDevice, Error>>>,
}

impl DeviceOpener {
    /// An opener that calls `open`; `name` is the name of the device in messages, usually its target name.
    pub fn new<F>(name: impl Into<Rc<str>>, open: impl Fn() -> F + 'static) -> DeviceOpener
    where
        F: Future<Output = Result<DynDevice, Error>> + 'static,
    {
        DeviceOpener { name: name.into(), open: Rc::new(move || Box::pin(open())) }
    }

    /// The name of the device in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens the device, behind its gate. The opener has its own time limits.
    ///
    /// # Errors
    /// When the device cannot be opened now. The caller may retry.
    pub async fn open(&self) -> Result<DynDevice, Error> {
        (self.open)().await
    }
}

impl fmt::Debug for DeviceOpener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceOpener").field(&self.name).finish()
    }
}
