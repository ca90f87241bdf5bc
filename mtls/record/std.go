package record

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

// aheadLen is the read-ahead of a handshake in bytes: a flight with two
// certificates fits; a longer one takes more reads.
const aheadLen = 4096

var aheadPool = sync.Pool{New: func() any { return new([aheadLen]byte) }}

// maxPending bounds what crypto/tls wants sent while the caller does not Take.
const maxPending = 4096

// errAgain makes crypto/tls give up for now: a temporary net.Error is the one
// kind that its reading half does not remember.
type errAgain struct{}

func (errAgain) Error() string   { return ErrMore.Error() }
func (errAgain) Timeout() bool   { return true }
func (errAgain) Temporary() bool { return true }

// again is boxed once, so that a drained Read allocates nothing.
var again net.Error = errAgain{}

var errPending = errors.New("record: the peer asks for more answers than it is sent: Take is not called, or it floods")

// transport is the net.Conn under a tls.Conn: the socket while it shakes hands,
// memory afterwards. It hands crypto/tls one record at a time, so that nothing
// behind the handshake is taken, and nothing is copied twice.
type transport struct {
	conn    net.Conn // nil in memory mode
	mem     bool
	left    int   // bytes of the current record still to hand over
	refused error // said by the configuration

	// Handshake only.
	ahead *[aheadLen]byte
	r, w  int
	rest  []byte // what was read ahead behind the handshake

	// Memory mode, reading half.
	in   []byte // fed and not handed over yet; borrowed
	hdr  [headerLen]byte
	hn   int // bytes of a split header handed over
	most int // length of the longest record so far

	// Memory mode, writing half.
	mu   sync.Mutex
	seal bool   // between begin and end: written bytes go to dst
	dst  []byte // the caller's
	pend []byte // written outside: answers and alerts
}

func newTransport(c net.Conn) *transport { return &transport{conn: c} }

// Refuse keeps the reason that a configuration's callback had.
func (t *transport) Refuse(err error) { t.refused = err }

func (t *transport) Read(p []byte) (int, error) {
	if t.mem {
		return t.readMem(p)
	}
	if t.ahead == nil {
		t.ahead = aheadPool.Get().(*[aheadLen]byte)
	}
	if t.left == 0 {
		for t.w-t.r < headerLen {
			if err := t.fill(); err != nil {
				return 0, err
			}
		}
		t.left = headerLen + int(binary.BigEndian.Uint16(t.ahead[t.r+3:]))
	}
	if t.r == t.w {
		if err := t.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, t.ahead[t.r:min(t.w, t.r+t.left)])
	t.r += n
	t.left -= n
	return n, nil
}

// fill reads once from the socket behind what is there.
func (t *transport) fill() error {
	if t.r > 0 {
		t.w = copy(t.ahead[:], t.ahead[t.r:t.w])
		t.r = 0
	}
	n, err := t.conn.Read(t.ahead[t.w:])
	t.w += n
	if n > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

// release gives the read-ahead buffer back, keeping what lies behind the handshake.
func (t *transport) release() {
	if t.ahead == nil {
		return
	}
	if t.r < t.w {
		t.rest = slices.Clone(t.ahead[t.r:t.w])
	}
	aheadPool.Put(t.ahead)
	t.ahead, t.r, t.w = nil, 0, 0
}

func (t *transport) readMem(p []byte) (int, error) {
	if len(t.in) == 0 {
		return 0, again
	}
	if t.left == 0 {
		if t.hn == 0 && len(t.in) >= headerLen {
			t.left = headerLen + int(binary.BigEndian.Uint16(t.in[3:]))
			t.most = max(t.most, t.left)
		} else { // a header in pieces
			n := copy(t.hdr[t.hn:], t.in)
			n = copy(p, t.in[:n])
			t.hn += n
			t.in = t.in[n:]
			if t.hn == headerLen {
				t.hn, t.left = 0, int(binary.BigEndian.Uint16(t.hdr[3:]))
				t.most = max(t.most, headerLen+t.left)
			}
			return n, nil
		}
	}
	n := copy(p, t.in[:min(len(t.in), t.left)])
	t.in = t.in[n:]
	t.left -= n
	return n, nil
}

func (t *transport) Write(p []byte) (int, error) {
	if !t.mem {
		return t.conn.Write(p)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.seal {
		t.dst = append(t.dst, p...)
		return len(p), nil
	}
	if len(t.pend)+len(p) > maxPending {
		return 0, errPending
	}
	t.pend = append(t.pend, p...)
	return len(p), nil
}

func (t *transport) begin(dst []byte) {
	t.mu.Lock()
	t.dst = append(dst, t.pend...)
	t.pend = t.pend[:0]
	t.seal = true
	t.mu.Unlock()
}

func (t *transport) end() []byte {
	t.mu.Lock()
	dst := t.dst
	t.dst, t.seal = nil, false
	t.mu.Unlock()
	return dst
}

// Close and the deadlines do nothing in memory mode: close_notify sets a write
// deadline, which is not to fall on the caller's socket.
func (t *transport) Close() error {
	if t.mem {
		return nil
	}
	return t.conn.Close()
}

func (t *transport) LocalAddr() net.Addr {
	if t.mem {
		return &net.TCPAddr{}
	}
	return t.conn.LocalAddr()
}

func (t *transport) RemoteAddr() net.Addr {
	if t.mem {
		return &net.TCPAddr{}
	}
	return t.conn.RemoteAddr()
}

func (t *transport) SetDeadline(d time.Time) error {
	if t.mem {
		return nil
	}
	return t.conn.SetDeadline(d)
}

func (t *transport) SetReadDeadline(d time.Time) error {
	if t.mem {
		return nil
	}
	return t.conn.SetReadDeadline(d)
}

func (t *transport) SetWriteDeadline(d time.Time) error {
	if t.mem {
		return nil
	}
	return t.conn.SetWriteDeadline(d)
}

// stdConn is crypto/tls over memory.
type stdConn struct {
	tc   *tls.Conn
	t    *transport
	kept int // bytes of t.in that are a copy of our own; 0: they are borrowed
}

func (c *stdConn) Feed(cipher []byte) {
	c.kept = 0
	if len(c.t.in) > 0 {
		cipher = slices.Concat(c.t.in, cipher)
		c.kept = cap(cipher)
	}
	c.t.in = cipher
}

func (c *stdConn) Partial() bool { return c.t.left > 0 || c.t.hn > 0 }

// Held counts the buffer of crypto/tls by the longest record that came: that buffer grows with records, and stays.
func (c *stdConn) Held() int {
	n := 0
	if c.t.most > 0 {
		n = c.t.most + bytes.MinRead
	}
	if len(c.t.in) > 0 {
		n += c.kept
	}
	return n
}

func (c *stdConn) Read(p []byte) (int, error) {
	n, err := c.tc.Read(p)
	switch {
	case n > 0: // an error that came with bytes is told again by the next call
		return n, nil
	case err == error(again):
		return 0, ErrMore
	}
	if err != nil {
		c.t.in = nil
	}
	return n, err
}

func (c *stdConn) Seal(dst, p []byte) ([]byte, error) {
	const overhead = 64 // more than any suite's
	c.t.begin(slices.Grow(dst, len(p)+(len(p)/MaxPlain+1)*overhead))
	_, err := c.tc.Write(p)
	return c.t.end(), err
}

func (c *stdConn) CloseNotify(dst []byte) []byte {
	c.t.begin(dst)
	c.tc.CloseWrite() // fails only where nothing can be sent any more
	return c.t.end()
}

func (c *stdConn) Pending() bool {
	c.t.mu.Lock()
	defer c.t.mu.Unlock()
	return len(c.t.pend) > 0
}

func (c *stdConn) Take(dst []byte) []byte {
	c.t.mu.Lock()
	defer c.t.mu.Unlock()
	dst = append(dst, c.t.pend...)
	c.t.pend = nil // rare, so not worth keeping
	return dst
}
