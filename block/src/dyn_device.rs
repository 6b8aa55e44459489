//! Devices behind their gates, with a type known only at run time, and openers of such devices.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::LocalBoxFuture;
use sealblock_units::Extent;

use crate::reused_future::ReusedFuture;
use crate::{Abilities, Counters, Device, Error, ErrorKind, Expectations, Gate, Geometry, Outcome, Request};

/// A device behind its gate, with a type known only at run time. Clones are the same device.
///
/// The futures of its requests are boxed and reused, so that a request allocates nothing in the long run. Since the
/// gate is inside, the type of a device is erased only once, at any position in a stack.
#[derive(Clone)]
pub struct DynDevice {
    device: Rc<dyn ObjectSafeDevice>,
    source: Option<Arc<dyn DeviceSource>>,
    _companion: Option<Rc<dyn Any>>,
}

impl DynDevice {
    /// Puts a gate in front of `device`, and erases the type; `name` is what errors call it, usually its target name.
    pub fn new(name: impl Into<Box<str>>, device: impl Device + 'static) -> DynDevice {
        DynDevice::from(Gate::new(name, device))
    }

    /// The same device. It keeps `companion` alive as long as there are clones of it.
    pub fn with_companion(self, companion: Rc<dyn Any>) -> DynDevice {
        DynDevice { _companion: Some(companion), ..self }
    }

    /// The same device, which `source` opens on other cores.
    pub fn on_every_core(self, source: impl DeviceSource + 'static) -> DynDevice {
        DynDevice { source: Some(Arc::new(source)), ..self }
    }

    /// What opens the device on other cores; `None` for one that stays on the core that opened it.
    pub fn source(&self) -> Option<Arc<dyn DeviceSource>> {
        self.source.clone()
    }

    /// The device that `layer` makes of this one, behind its own gate. It is on every core if this one is: then `layer`
    /// is called on each of them.
    ///
    /// # Errors
    /// Those of `layer`.
    pub fn layered<D: Device + 'static, E: fmt::Display>(
        self,
        name: impl Into<Arc<str>>,
        layer: impl Fn(DynDevice) -> Result<D, E> + Send + Sync + 'static,
    ) -> Result<DynDevice, E> {
        let (name, below) = (name.into(), self.source());
        let device = DynDevice::new(&*name, layer(self)?);
        Ok(match below {
            None => device,
            Some(below) => device.on_every_core(move || DynDevice::over(&name, layer(below.open_here()?))),
        })
    }

    /// The same device, which is made of `members`. It is on every core if all of them are: there `layer` makes it of
    /// them.
    pub fn made_of<D: Device + 'static, E: fmt::Display>(
        self,
        members: &[DynDevice],
        layer: impl Fn(Vec<DynDevice>) -> Result<D, E> + Send + Sync + 'static,
    ) -> DynDevice {
        let name: Arc<str> = self.name().into();
        let Some(members) = members.iter().map(DynDevice::source).collect::<Option<Vec<_>>>() else { return self };
        self.on_every_core(move || {
            let opened: Result<Vec<DynDevice>, Error> = members.iter().map(|member| member.open_here()).collect();
            DynDevice::over(&name, layer(opened?))
        })
    }

    /// A layer as opened on another core than the first.
    fn over<E: fmt::Display>(name: &str, layer: Result<impl Device + 'static, E>) -> Result<DynDevice, Error> {
        let layer = layer.map_err(|why| Error::from(ErrorKind::Unreachable { reason: why.to_string() }))?;
        Ok(DynDevice::new(name, layer))
    }

    /// What errors call the device.
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// Counters of the requests that went through the gate so far, which every core may read.
    pub fn counters(&self) -> &Arc<Counters> {
        self.device.counters()
    }

    /// Verifies by Read requests even if the device has a native Verify; see [`Gate::verify_by_reading`].
    ///
    /// # Errors
    /// Those of a Verify.
    pub async fn verify_by_reading(&self, extent: Extent, expectations: Expectations) -> Outcome {
        self.device.verify_by_reading(extent, expectations).await
    }
}

impl<D: Device + 'static> From<Gate<D>> for DynDevice {
    fn from(gate: Gate<D>) -> DynDevice {
        DynDevice::from(Rc::new(gate))
    }
}

impl<D: Device + 'static> From<Rc<Gate<D>>> for DynDevice {
    fn from(gate: Rc<Gate<D>>) -> DynDevice {
        DynDevice { device: Rc::new(ErasedGate { gate, idle: RefCell::default() }), source: None, _companion: None }
    }
}

impl Device for DynDevice {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.device.abilities()
    }

    fn execute(&self, request: Request) -> impl Future<Output = Outcome> {
        let future = self.device.take_future();
        future.begin(request);
        ExecuteFuture { device: &*self.device, future: Some(future) }
    }

    fn executes_in_place(&self) -> bool {
        self.device.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        self.device.try_execute(request)
    }
}

/// The maximum number of idle futures per device.
const IDLE_LIMIT: usize = 256;

/// The methods of [`Gate`] that need no type.
trait ObjectSafeDevice {
    fn geometry(&self) -> &Geometry;
    fn abilities(&self) -> Abilities;
    fn name(&self) -> &str;
    fn counters(&self) -> &Arc<Counters>;
    fn verify_by_reading(&self, extent: Extent, expectations: Expectations) -> LocalBoxFuture<'_, Outcome>;
    fn executes_in_place(&self) -> bool;
    fn try_execute(&self, request: &Request) -> Option<Outcome>;
    fn take_future(&self) -> PooledFuture;
    fn put_back(&self, future: PooledFuture);
}

/// A gate and the idle futures of its device.
struct ErasedGate<D> {
    gate: Rc<Gate<D>>,
    idle: RefCell<Vec<PooledFuture>>,
}

/// A future that executes one request after the other.
type PooledFuture = ReusedFuture<Request, Outcome>;

impl<D: Device + 'static> ObjectSafeDevice for ErasedGate<D> {
    fn geometry(&self) -> &Geometry {
        self.gate.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.gate.abilities()
    }

    fn name(&self) -> &str {
        self.gate.name()
    }

    fn counters(&self) -> &Arc<Counters> {
        self.gate.counters()
    }

    fn verify_by_reading(&self, extent: Extent, expectations: Expectations) -> LocalBoxFuture<'_, Outcome> {
        self.gate.verify_by_reading(extent, expectations)
    }

    fn executes_in_place(&self) -> bool {
        self.gate.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        self.gate.try_execute(request)
    }

    fn take_future(&self) -> PooledFuture {
        let idle = self.idle.borrow_mut().pop();
        idle.unwrap_or_else(|| {
            let gate = Rc::clone(&self.gate);
            ReusedFuture::new(async move |request| gate.execute(request).await)
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
        let Poll::Ready(outcome) = pooled.poll(cx) else { return Poll::Pending };
        if let Some(pooled) = self.future.take() {
            self.device.put_back(pooled);
        }
        Poll::Ready(outcome)
    }
}

/// Opens one device for any core: what is stored, and what is known of it, is the same on all of them.
///
/// Requests of several cores then reach the device at the same time. So it must keep by itself what one core gave it for
/// free: a block has the data of one write together with its tags, and a Flush covers the writes of all cores that had
/// completed before.
pub trait DeviceSource: Send + Sync {
    /// Opens the device for the calling core, behind a gate of its own, with the geometry and the abilities that it has
    /// on every core. It does not wait.
    ///
    /// # Errors
    /// When something that each core needs cannot be had, such as a file descriptor.
    fn open_here(&self) -> Result<DynDevice, Error>;
}

impl<F: Fn() -> Result<DynDevice, Error> + Send + Sync> DeviceSource for F {
    fn open_here(&self) -> Result<DynDevice, Error> {
        self()
    }
}

/// Opens a device, each time that a layer has lost it. Clones open the same device.
///
/// Dropping an opened device closes it. A caller that must close devices cleanly keeps handles for that itself.
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
