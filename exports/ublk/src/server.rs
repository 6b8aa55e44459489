//! A queue on its core: one future for each request that can exist at a time, which completes one request and waits for
//! the next.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures_util::future::{Either, join_all, select};
use sealblock_block::{
    BadBlock, Condition, Device, Durability, Expectations, FlushCursor, Outcome, Request, Response, WriteData,
};
use sealblock_integrity::{PiFormat, Sealed, Tags, Unsealed};
use sealblock_layers_cross_core::{Attached, SharedDevice};
use sealblock_runtime_reactor::{now, pool};
use sealblock_runtime_ublk::{CharacterDevice, Descriptor, Queue};
use sealblock_units::Extent;

use crate::requests::{Command, errno, good_before, translate};
use crate::tags::{BadWrite, of_write, put_of_read};

/// Bits that are changed between the kernel and the checks here, to prove that these changes are detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tampering {
    /// The first bit of the data of each read.
    Reads,
    /// The first bit of the data of each write.
    Writes,
}

/// What all queues of a block device serve: the current device.
pub(crate) struct CurrentDevice {
    device: Mutex<SharedDevice>,
    /// Counts changes, so that queues look at the device only after a change.
    changes: AtomicU64,
}

impl CurrentDevice {
    pub(crate) fn new(device: SharedDevice) -> CurrentDevice {
        CurrentDevice { device: Mutex::new(device), changes: AtomicU64::new(0) }
    }

    pub(crate) fn get(&self) -> SharedDevice {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes requests that begin from now on go to the same device with another size.
    pub(crate) fn set(&self, device: SharedDevice) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = device;
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// The server of one queue; it is sent to the core that serves it.
pub struct QueueServer {
    pub(crate) character: CharacterDevice,
    pub(crate) number: u16,
    pub(crate) depth: u16,
    pub(crate) host: Option<PiFormat>,
    pub(crate) device: Arc<CurrentDevice>,
    pub(crate) cursor: Arc<FlushCursor>,
    pub(crate) durability: Durability,
    pub(crate) tampering: Option<Tampering>,
}

impl QueueServer {
    /// Serves the queue on this core until the block device stops, or until `stop`. Then requests in progress are
    /// executed but not completed, so that the block device's next server gets them again.
    ///
    /// # Errors
    /// If the queue cannot be served, or the driver refuses a command.
    pub async fn run(self, stop: impl Future<Output = ()>) -> io::Result<()> {
        let queue = self.character.queue(self.number, self.depth)?;
        // The driver keeps a device as long as it is open.
        drop(self.character);
        let served = ServedQueue {
            queue,
            attached: RefCell::new((0, Rc::new(self.device.get().attach_as(&self.cursor)))),
            device: self.device,
            cursor: self.cursor,
            host: self.host,
            durability: self.durability,
            tampering: self.tampering,
            is_stopping: Cell::new(false),
            stopping: Condition::default(),
        };
        let requests = all_or_none((0..self.depth).map(|tag| served.serve(tag)), || served.stop());
        match select(pin!(requests), pin!(stop)).await {
            Either::Left((ended, _)) => ended,
            Either::Right(((), requests)) => {
                served.stop();
                requests.await
            }
        }
    }
}

/// Waits until all of them have ended. The first one that fails makes the others `stop`: if only some queues were
/// served, the requests of the others would never complete, and nobody would notice.
///
/// # Errors
/// The first error, in the order of the futures.
pub async fn all_or_none<E>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<(), E>>>,
    stop: impl Fn(),
) -> Result<(), E> {
    let stop = &stop;
    let watched = futures.into_iter().map(|future| async move { future.await.inspect_err(|_| stop()) });
    join_all(watched).await.into_iter().collect()
}

struct ServedQueue {
    queue: Queue,
    device: Arc<CurrentDevice>,
    cursor: Arc<FlushCursor>,
    /// The device after this number of changes.
    attached: RefCell<(u64, Rc<Attached>)>,
    /// The format of the host's tags, if it makes any.
    host: Option<PiFormat>,
    /// The minimum durability of a change when it is acknowledged.
    durability: Durability,
    tampering: Option<Tampering>,
    is_stopping: Cell<bool>,
    stopping: Condition,
}

impl ServedQueue {
    /// The current device. Each request calls this once, and keeps the device with which it began.
    fn device(&self) -> Rc<Attached> {
        let changes = self.device.changes.load(Ordering::Acquire);
        let mut attached = self.attached.borrow_mut();
        if attached.0 != changes {
            *attached = (changes, Rc::new(self.device.get().attach_as(&self.cursor)));
        }
        Rc::clone(&attached.1)
    }

    /// No more requests are waited for.
    fn stop(&self) {
        self.is_stopping.set(true);
        self.stopping.notify();
    }

    /// Serves the requests of one tag, one after the other.
    async fn serve(&self, tag: u16) -> io::Result<()> {
        let mut result = None;
        loop {
            let fetched = async {
                match result {
                    None => self.queue.fetch(tag).await,
                    Some(result) => self.queue.commit_and_fetch(tag, result).await,
                }
            };
            let stopped = self.stopping.wait_until(|| self.is_stopping.get());
            match select(pin!(fetched), pin!(stopped)).await {
                Either::Left((Ok(()), _)) => {}
                // The block device stops.
                Either::Left((Err(error), _)) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(()),
                Either::Left((Err(error), _)) => return Err(error),
                // The command is cancelled, and the driver keeps the request.
                Either::Right(_) => return Ok(()),
            }
            result = Some(self.answer(tag).await);
            if self.is_stopping.get() {
                return Ok(());
            }
        }
    }

    /// Executes the request of a tag; returns its bytes, or a negative error number.
    async fn answer(&self, tag: u16) -> i32 {
        let arrived = now();
        let device = &self.device();
        let described = self.queue.descriptor(tag);
        let command =
            described.and_then(|request| Some((request, translate(&request, device.geometry(), self.durability)?)));
        let Some((request, command)) = command else {
            tracing::warn!(?described, "the kernel sent a request that the device was not made for");
            return -libc::EINVAL;
        };
        let done = match command {
            Command::Read(extent) => self.read((device, arrived), tag, &request, extent).await,
            Command::Write(extent, durability) => {
                self.write((device, arrived), (tag, &request), extent, durability).await
            }
            Command::Flush => execute((device, arrived), Request::flush()).await.map(|_| 0),
            Command::Discard(extent) => {
                execute((device, arrived), Request::discard([extent])).await.map(|_| bytes_of(device, extent))
            }
            Command::WriteZeroes { extent, may_unmap, durability } => {
                let zero = Request::write_zeroes(extent, may_unmap, durability);
                execute((device, arrived), zero).await.map(|_| bytes_of(device, extent))
            }
        };
        done.unwrap_or_else(|errno| -errno)
    }

    /// Reads blocks. If one of them is bad, those before it are returned; the kernel requests the others again, and the
    /// request that begins with the bad block fails.
    async fn read(
        &self,
        (device, arrived): (&Attached, Instant),
        tag: u16,
        request: &Descriptor,
        extent: Extent,
    ) -> Result<i32, i32> {
        let outcome = outcome_of(device, Request::read(extent, Expectations::NONE), arrived).await;
        let (outcome, extent) = match &outcome {
            Err(error) => match good_before(extent, error) {
                Some(before) => (outcome_of(device, Request::read(before, Expectations::NONE), now()).await, before),
                None => (outcome, extent),
            },
            Ok(_) => (outcome, extent),
        };
        match outcome.map_err(|error| errno(error.kind()))? {
            Response::Data(blocks) => self.put(tag, request, extent, &blocks),
            // Only a broken device returns another response to a read.
            _ => Err(libc::EIO),
        }
    }

    fn put(&self, tag: u16, request: &Descriptor, extent: Extent, blocks: &Sealed) -> Result<i32, i32> {
        let mut done = 0;
        for segment in blocks.segments() {
            self.queue.write_data(tag, done, &segment.data).map_err(|error| of_copy(&error))?;
            done += segment.data.len() as u32;
        }
        if self.tampering == Some(Tampering::Reads) {
            let first = blocks.iter().next().and_then(|(data, _)| data.first().copied()).unwrap_or_default();
            self.queue.write_data(tag, 0, &[first ^ 1]).map_err(|error| of_copy(&error))?;
        }
        if let Some(host) = self.host.filter(|_| request.has_tags) {
            let put = |offset, tags: &[u8]| self.queue.write_tags(tag, offset, tags);
            put_of_read(blocks, host, extent.start(), put).map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => libc::EILSEQ,
                _ => of_copy(&error),
            })?;
        }
        Ok(done as i32)
    }

    async fn write(
        &self,
        (device, arrived): (&Attached, Instant),
        (tag, request): (u16, &Descriptor),
        extent: Extent,
        durability: Durability,
    ) -> Result<i32, i32> {
        let geometry = device.geometry();
        let (size, bytes) = (geometry.block_size, bytes_of(device, extent));
        let mut data = pool().take(bytes as usize);
        self.queue.read_data(tag, &mut data).map_err(|error| of_copy(&error))?;
        if self.tampering == Some(Tampering::Writes) {
            data[0] ^= 1;
        }
        let blocks: WriteData = match self.host.filter(|_| request.has_tags) {
            Some(host) => {
                let mut tags = pool().take(extent.len() as usize * host.tuple_bytes());
                self.queue.read_tags(tag, &mut tags).map_err(|error| of_copy(&error))?;
                let pair = (data.freeze(), tags.freeze());
                of_write(pair, size, host, geometry.protection, extent.start()).map_err(|bad| refused(&bad))?.into()
            }
            None => {
                let tags = Tags { initial_ref_tag: extent.start().get(), ..Tags::default() };
                Unsealed::new(data.freeze(), size, geometry.protection, tags).into()
            }
        };
        execute((device, arrived), Request::write(extent, blocks, durability)).await.map(|_| bytes)
    }
}

/// The bytes of a request. The driver keeps the number of sectors in 32 bits; for discards and zeroes it only checks
/// that the result is not negative.
fn bytes_of(device: &Attached, extent: Extent) -> i32 {
    i32::try_from(extent.bytes(device.geometry().block_size)).unwrap_or(i32::MAX)
}

async fn outcome_of(device: &Attached, request: Request, arrived: Instant) -> Outcome {
    match device.try_execute_arrived(&request, arrived) {
        Some(outcome) => outcome,
        None => device.execute_arrived(request, arrived).await,
    }
}

async fn execute((device, arrived): (&Attached, Instant), request: Request) -> Result<Response, i32> {
    outcome_of(device, request, arrived).await.map_err(|error| errno(error.kind()))
}

/// The error number of a write whose blocks do not match their tags: nothing was written.
fn refused(bad: &BadWrite) -> i32 {
    match bad {
        BadWrite::Shape => libc::EINVAL,
        BadWrite::Mismatch(BadBlock { lba, cause, .. }) => {
            tracing::warn!(block = %lba, field = %cause, "a block of a write did not match its tag on its way here; nothing was written");
            libc::EILSEQ
        }
    }
}

/// The error number of a failed copy to or from the kernel.
fn of_copy(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use futures_executor::block_on;

    use super::*;

    #[test]
    fn one_that_fails_ends_the_others_and_its_error_is_told() {
        let (is_stopping, stopping) = (Cell::new(false), Condition::default());
        let stop = || {
            is_stopping.set(true);
            stopping.notify();
        };
        let serve = |number: u8| {
            let (is_stopping, stopping) = (&is_stopping, &stopping);
            async move {
                if number == 3 {
                    return Err(number);
                }
                stopping.wait_until(|| is_stopping.get()).await;
                Ok(())
            }
        };
        assert_eq!(block_on(all_or_none((0..8).map(serve), stop)), Err(3));
        is_stopping.set(true);
        assert_eq!(block_on(all_or_none((4..8).map(serve), || panic!("nothing has failed"))), Ok(()));
    }
}
