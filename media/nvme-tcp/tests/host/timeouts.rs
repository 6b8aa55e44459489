//! Unsent bytes of a connection that timed out.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use crate::common::*;
use sealblock_block::ErrorKind;
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_media_nvme_tcp::{Options, Reconnect};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{sleep, spawn};
use sealblock_units::BlockSize;

/// A connection to a target that stops forwarding the host's bytes once it is cut, and then reports how each connection
/// ended.
#[derive(Clone, Default)]
struct Wire {
    is_cut: Rc<Cell<bool>>,
    is_read: Rc<Cell<bool>>,
    ends: Rc<RefCell<Vec<io::Result<()>>>>,
}

impl Wire {
    fn serve(&self, target: SocketAddr) -> SocketAddr {
        let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
        let (address, wire) = (listener.local_addr().unwrap(), self.clone());
        spawn(async move {
            while let Ok((host, _)) = listener.accept().await {
                let (host, target) = (Rc::new(host), Rc::new(Stream::connect(target).await.unwrap()));
                spawn(back(Rc::clone(&target), Rc::clone(&host)));
                spawn(wire.clone().forth(host, target));
            }
        });
        address
    }

    async fn forth(self, host: Rc<Stream>, target: Rc<Stream>) {
        let mut buffer = Buffer::zeroed(64 << 10);
        loop {
            while self.is_cut.get() && !self.is_read.get() {
                sleep(Duration::from_millis(5)).await;
            }
            let result;
            (result, buffer) = host.recv(buffer).await;
            match result {
                Ok(0) => return self.ends.borrow_mut().push(Ok(())),
                Err(error) => return self.ends.borrow_mut().push(Err(error)),
                Ok(_) if self.is_cut.get() => {}
                Ok(len) => drop(target.send_all([Buffer::copy_from(&buffer[..len]).freeze()]).await),
            }
        }
    }
}

async fn back(target: Rc<Stream>, host: Rc<Stream>) {
    let mut buffer = Buffer::zeroed(64 << 10);
    loop {
        let result;
        (result, buffer) = target.recv(buffer).await;
        let Ok(len @ 1..) = result else { return };
        if host.send_all([Buffer::copy_from(&buffer[..len]).freeze()]).await.is_err() {
            return;
        }
    }
}

#[test]
fn commands_that_are_lost_are_not_sent_any_more() {
    run(|| async {
        let served = serve(&[(memory(BlockSize::B4096, None), PiVisibility::Plain)]);
        let wire = Wire::default();
        let options = Options {
            request_timeout: Duration::from_millis(300),
            reconnect: Reconnect { attempts: 0, ..Reconnect::default() },
            ..options()
        };
        let through = Served { address: wire.serve(served.address), ..served };
        let device = Rc::new(open(&through, 1, options).await);
        write(&*device, extent(0, 1), 1).await.unwrap();
        wire.is_cut.set(true);
        let write_one = |i| {
            let device = Rc::clone(&device);
            spawn(async move { write(&*device, extent(i, 1), 2).await })
        };
        let writes: Vec<_> = (0..100).map(write_one).collect();
        for outcome in writes {
            let error = outcome.await.unwrap().unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }), "{error}");
        }
        drop(device);
        // The system closes what the tasks of the connection have released.
        sleep(Duration::from_millis(100)).await;
        wire.is_read.set(true);
        while wire.ends.borrow().len() < 2 {
            sleep(Duration::from_millis(5)).await;
        }
        let is_reset = |end: &&io::Result<()>| end.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset);
        assert_eq!(wire.ends.borrow().iter().filter(is_reset).count(), 1, "{:?}", wire.ends.borrow());
        through.target.stop();
    });
}

#[test]
fn a_device_that_is_closed_ends_its_connections_in_good_order() {
    run(|| async {
        let served = serve(&[(memory(BlockSize::B4096, None), PiVisibility::Plain)]);
        let wire = Wire::default();
        let through = Served { address: wire.serve(served.address), ..served };
        let device = open(&through, 1, options()).await;
        write(&device, extent(0, 1), 1).await.unwrap();
        device.device().close().await;
        while wire.ends.borrow().len() < 2 {
            sleep(Duration::from_millis(5)).await;
        }
        assert!(wire.ends.borrow().iter().all(Result::is_ok), "{:?}", wire.ends.borrow());
        through.target.stop();
    });
}
