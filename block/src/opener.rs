//! A way to open a device anew.

use std::fmt;
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;

use crate::{DynDevice, Error};

/// What opens a device: as often as a layer needs it again after it was lost. Clones are the same way.
///
/// What is opened ends when it is dropped; who leaves devices clean in the end keeps what it has to know for that.
#[derive(Clone)]
pub struct DeviceOpener {
    name: Rc<str>,
    open: Rc<dyn Fn() -> LocalBoxFuture<'static, Result<DynDevice, Error>>>,
}

impl DeviceOpener {
    /// The way that `open` goes; `name` is what people call the device, usually its target name.
    pub fn new<F>(name: impl Into<Rc<str>>, open: impl Fn() -> F + 'static) -> DeviceOpener
    where
        F: Future<Output = Result<DynDevice, Error>> + 'static,
    {
        DeviceOpener { name: name.into(), open: Rc::new(move || Box::pin(open())) }
    }

    /// What people call the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens the device, behind its gate. Time limits are the opener's own.
    ///
    /// # Errors
    /// Why it cannot be opened now; it may be tried again.
    pub async fn open(&self) -> Result<DynDevice, Error> {
        (self.open)().await
    }
}

impl fmt::Debug for DeviceOpener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Source").field(&self.name).finish()
    }
}
