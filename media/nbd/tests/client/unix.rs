//! The same over a Unix socket: our own server, and cases without one.

use std::os::unix::net::UnixListener;
use std::path::Path;

use crate::common::{BLOCKS, extent, holds, impatient, plain, run, serve_on, write};
use sealblock_block::{Device, Gate};
use sealblock_media_nbd::{Address, ConnectError, NbdDevice, discover};
use sealblock_runtime_reactor::net::Listener;
use sealblock_units::BlockSize;

fn at(path: &Path) -> Address {
    Address::Unix(path.to_owned())
}

#[test]
fn an_export_is_written_and_read_over_a_unix_socket() {
    run(|| async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = Listener::from_fd(UnixListener::bind(&path).unwrap().into()).unwrap();
        let (server, serving) = serve_on(listener, &plain(BlockSize::B4096));
        let names: Vec<_> =
            discover(at(&path), impatient()).await.unwrap().into_iter().map(|listed| listed.name).collect();
        assert_eq!(names, ["disk", "fixed"]);
        let remote = NbdDevice::connect(at(&path), "disk", impatient()).await.unwrap();
        assert_eq!(remote.geometry().capacity_blocks, BLOCKS);
        // Longer than the sockets buffer at once, in both directions.
        let remote = Gate::new("remote", remote);
        write(&remote, extent(3, 2048), 7).await.unwrap();
        assert!(holds(&remote, extent(3, 2048), 7).await);
        let clients = server.clients();
        let own = format!("process {} of user", std::process::id());
        assert!(!clients.is_empty() && clients.iter().all(|client| client.from.starts_with(&own)), "{clients:?}");
        remote.device().close().await;
        server.stop();
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn where_nobody_listens_is_named() {
    run(|| async {
        let folder = tempfile::tempdir().unwrap();
        let stale = folder.path().join("stale");
        drop(UnixListener::bind(&stale).unwrap());
        let long = folder.path().join("x".repeat(200));
        for (path, why) in [(folder.path().join("none"), "No such file"), (stale, "refused"), (long, "107 bytes")] {
            let error = NbdDevice::connect(at(&path), "disk", impatient()).await.err().unwrap();
            assert!(matches!(error, ConnectError::Connect { .. }), "{error:?}");
            let words = error.to_string();
            assert!(words.contains(&path.display().to_string()) && words.contains(why), "{words}");
        }
    });
}
