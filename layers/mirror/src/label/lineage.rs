//! The lineage of a mirror's content: the sessions that changed it, newest first, and how far each is known.
//!
//! A *session* is one opening of the mirror that changed its content (or let a reader see nosync content). It draws
//! an identity at its first change. The first labels that name it call it unconfirmed: nothing was changed yet. The
//! next labels confirm it, and only then replicas execute changes. Within a session, each label that must precede a
//! change has a higher event count. So the content of one label descends from that of another exactly if it knows the
//! other's newest confirmed session as far as the other does, whatever their event counts: this tells an older image
//! that was written alone from a replica that only lacks changes.

/// Most sessions in a label. An image that is older than all of them is refused: nothing tells any more whether it
/// was written alone.
pub const MAX_SESSIONS: usize = 256;

/// Bytes of a session in a label.
pub(crate) const SESSION_BYTES: usize = 16;

/// Set in the identity of an unconfirmed session. Identities have the other 63 bits.
const UNCONFIRMED: u64 = 1 << 63;

/// An opening of the mirror that changed it, or was about to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Session {
    /// Random, 63 bits.
    pub id: u64,
    /// True if something may have been changed in it.
    pub is_confirmed: bool,
    /// Event count of its last label that preceded a change, as far as known.
    pub until: u64,
}

/// The sessions that a label knows, newest first.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lineage {
    sessions: Vec<Session>,
}

impl Lineage {
    /// The sessions, newest first.
    pub fn sessions(&self) -> &[Session] {
        &self.sessions
    }

    /// The last session that may have changed something.
    pub fn newest(&self) -> Option<Session> {
        self.sessions.iter().find(|session| session.is_confirmed).copied()
    }

    /// A session by its identity, confirmed or not.
    pub fn find(&self, id: u64) -> Option<Session> {
        self.sessions.iter().find(|session| session.id == id).copied()
    }

    /// True if older sessions may have been dropped.
    pub fn is_full(&self) -> bool {
        self.sessions.len() >= MAX_SESSIONS
    }

    /// Begins an unconfirmed session with this identity, or the next free one, in a label with this event count.
    pub fn begin(&mut self, drawn: u64, events: u64) {
        let mut id = drawn & !UNCONFIRMED;
        while self.find(id).is_some() {
            id = id.wrapping_add(1) & !UNCONFIRMED;
        }
        self.sessions.insert(0, Session { id, is_confirmed: false, until: events });
        self.sessions.truncate(MAX_SESSIONS);
    }

    /// Confirms the newest session in a label with this event count: from that label on it may make further changes.
    pub fn confirm(&mut self, events: u64) {
        if let Some(session) = self.sessions.first_mut() {
            session.is_confirmed = true;
            session.until = events;
        }
    }

    /// Encodes the sessions, [`SESSION_BYTES`] each.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.sessions.len() * SESSION_BYTES);
        for session in &self.sessions {
            let word = session.id | if session.is_confirmed { 0 } else { UNCONFIRMED };
            bytes.extend_from_slice(&word.to_le_bytes());
            bytes.extend_from_slice(&session.until.to_le_bytes());
        }
        bytes
    }

    /// Decodes sessions; `None` if there are too many, or two of one identity.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Lineage> {
        let mut lineage = Lineage::default();
        let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        while let (Some(word), Some(until)) = (words.next(), words.next()) {
            let session = Session { id: word & !UNCONFIRMED, is_confirmed: word & UNCONFIRMED == 0, until };
            if lineage.is_full() || lineage.find(session.id).is_some() {
                return None;
            }
            lineage.sessions.push(session);
        }
        Some(lineage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_counts_once_it_is_confirmed_and_is_known_before() {
        let mut lineage = Lineage::default();
        assert_eq!(lineage.newest(), None);
        lineage.begin(7, 1);
        assert!(lineage.find(7).is_some() && lineage.newest().is_none());
        lineage.confirm(2);
        lineage.begin(7, 3);
        let newest = Session { id: 7, is_confirmed: true, until: 2 };
        assert_eq!(
            (lineage.newest(), lineage.sessions()[0].id),
            (Some(newest), 8),
            "no two sessions have one identity"
        );
        lineage.begin(u64::MAX, 4);
        lineage.confirm(5);
        assert_eq!(lineage.newest(), Some(Session { id: u64::MAX >> 1, is_confirmed: true, until: 5 }));
        assert_eq!(Lineage::from_bytes(&lineage.to_bytes()), Some(lineage));
    }

    #[test]
    fn the_oldest_sessions_are_forgotten_and_no_more_are_read() {
        let mut lineage = Lineage::default();
        for id in 0..300 {
            lineage.begin(id, 2 * id);
            lineage.confirm(2 * id + 1);
        }
        assert!(lineage.is_full() && lineage.find(299).is_some());
        assert!(lineage.find(44).is_some() && lineage.find(43).is_none());
        let mut bytes = lineage.to_bytes();
        assert_eq!(Lineage::from_bytes(&bytes), Some(lineage));
        bytes.extend_from_slice(&[7; SESSION_BYTES]);
        assert_eq!(Lineage::from_bytes(&bytes), None);
        assert_eq!(Lineage::from_bytes(&[5; 2 * SESSION_BYTES]), None, "one twice");
    }
}
