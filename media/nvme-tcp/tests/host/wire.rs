//! Damage between this host and the target, without digests: only the tags can detect it.

use std::cell::Cell;
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::rc::Rc;

use crate::common::*;
use sealblock_block::{Device, Durability, Request};
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::spawn;
use sealblock_units::BlockSize;

/// The application tag by which this proxy finds the tuple.
const MARK: [u8; 2] = [0xBE, 0xEF];
const FILL: u8 = 0x11;

/// The next damage: invert a bit in the byte at this distance from the application tag.
type Flip = Rc<Cell<Option<isize>>>;

/// A proxy to `target` that damages data on the way there.
fn damaging(target: SocketAddr, flip: &Flip) -> SocketAddr {
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 8).unwrap();
    let (address, flip) = (listener.local_addr().unwrap(), Rc::clone(flip));
    spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let (near, far) = (Rc::new(near), Rc::new(Stream::connect(target).await.unwrap()));
            spawn(copy(Rc::clone(&near), Rc::clone(&far), Some(Rc::clone(&flip))));
            spawn(copy(far, near, None));
        }
    });
    address
}

async fn copy(from: Rc<Stream>, to: Rc<Stream>, flip: Option<Flip>) {
    loop {
        let (Ok(len @ 1..), mut buffer) = from.recv(Buffer::zeroed(256 << 10)).await else { break };
        if let Some(flip) = &flip {
            spoil(&mut buffer[..len], flip);
        }
        if to.send_all([Slice::copy_from(&buffer[..len])]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn spoil(bytes: &mut [u8], flip: &Flip) {
    let is_tuple = |window: &[u8]| window[..2] == [FILL; 2] && window[4..] == MARK;
    if let (Some(at), Some(offset)) = (bytes.windows(6).position(is_tuple), flip.get()) {
        flip.set(None);
        bytes[(at + 4).strict_add_signed(offset)] ^= 0x40;
    }
}

fn marked(extent: sealblock_units::Extent) -> Request {
    let size = BlockSize::B4096;
    let tags = Tags { app_tag: u16::from_be_bytes(MARK), storage_tag: 0, initial_ref_tag: extent.start().get() };
    let data = Slice::copy_from(&vec![FILL; extent.bytes(size) as usize]);
    let data = Sealed::seal(data, size, Some(crc16()), &tags);
    Request::write(extent, data, Durability::Volatile)
}

#[test]
fn damage_on_the_wire_is_refused_and_nothing_is_written() {
    run(|| async {
        let served = serve(&[(memory(BlockSize::B4096, Some(crc16())), PiVisibility::Protected)]);
        let flip = Flip::default();
        let address = damaging(served.address, &flip);
        let near = open(&served, 1, options()).await;
        let far = NvmeTcpDevice::connect(address.into(), SUBNQN.parse().unwrap(), None, options()).await.unwrap();
        let place = extent(8, 1);
        // Good: an undamaged wire.
        far.execute(marked(place)).await.unwrap();
        let before = write(&near, place, 3).await.map(|_| sealed(&near, place, 3)).unwrap();
        for (offset, field) in [(-100, "Guard"), (-1, "Guard"), (0, "Application Tag"), (5, "Reference Tag")] {
            flip.set(Some(offset));
            let error = far.execute(marked(place)).await.unwrap_err();
            assert_eq!(flip.get(), None, "the wire has seen the tuple");
            assert!(error.bad_blocks().is_none(), "{error}: nothing that is stored is bad");
            assert!(error.to_string().contains(&format!("End-to-end {field} Check Error")), "{offset}: {error}");
            assert_eq!(read(&near, place).await.unwrap().joined_data()[..], before.joined_data()[..], "{offset}");
        }
        served.target.stop();
    });
}
