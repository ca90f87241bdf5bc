package http2

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	oracle "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// wire is the peer of a Conn under test: it writes frames with x/net's Framer
// and reads ours with it.
type wire struct {
	*oracle.Framer // writes to in, reads from out
	t              testing.TB
	c              *Conn
	h              *recorder
	in, out        bytes.Buffer
	block          bytes.Buffer
	enc            *hpack.Encoder
	dec            *hpack.Decoder
}

// newWire makes a Conn and its peer, who have exchanged SETTINGS.
func newWire(t testing.TB, cfg Config, settings ...oracle.Setting) *wire {
	t.Helper()
	w := rawWire(t, cfg)
	if cfg.Server {
		w.in.WriteString(clientPreface)
	}
	w.WriteSettings(settings...)
	w.WriteSettingsAck()
	w.want("", "")
	w.frames()
	return w
}

// rawWire makes a Conn and a peer that has said nothing yet.
func rawWire(t testing.TB, cfg Config) *wire {
	w := &wire{t: t, h: new(recorder), dec: hpack.NewDecoder(4096, nil)}
	w.c = New(cfg, w.h)
	w.Framer = oracle.NewFramer(&w.in, &w.out)
	w.Framer.AllowIllegalWrites = true
	w.Framer.AllowIllegalReads = true
	w.enc = hpack.NewEncoder(&w.block)
	return w
}

// fields encodes a field block.
func (w *wire) fields(kv ...string) []byte {
	w.block.Reset()
	for i := 0; i < len(kv); i += 2 {
		w.enc.WriteField(hpack.HeaderField{Name: kv[i], Value: kv[i+1]})
	}
	return w.block.Bytes()
}

var getRoot = []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a"}
var postRoot = []string{":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a"}

// head writes a whole header block in one frame.
func (w *wire) head(id uint32, end bool, kv ...string) {
	w.WriteHeaders(oracle.HeadersFrameParam{StreamID: id, BlockFragment: w.fields(kv...), EndStream: end, EndHeaders: true})
}

// feed gives the Conn what was written, and returns the code of the error
// that came of it, or "".
func (w *wire) feed() string {
	w.t.Helper()
	n, err := w.c.Feed(w.in.Bytes())
	if n != w.in.Len() {
		w.t.Fatalf("Feed took %d of %d bytes", n, w.in.Len())
	}
	w.in.Reset()
	if err == nil {
		return ""
	}
	var ce *ConnError
	if !errors.As(err, &ce) {
		w.t.Fatalf("Feed: %T, want *ConnError", err)
	}
	return ce.Code.String()
}

// want feeds what was written and compares the events and the error's code.
func (w *wire) want(events, code string) {
	w.t.Helper()
	if got := w.feed(); got != code {
		w.t.Errorf("Feed: %q, want %q (%v)", got, code, w.c.err)
	}
	if got := w.h.take(); got != events {
		w.t.Errorf("events\n%s\nwant\n%s", got, events)
	}
}

// frames takes what the Conn wants to send and shows it, a frame a line.
func (w *wire) frames() string {
	w.t.Helper()
	out := w.c.Out()
	w.out.Write(bytes.TrimPrefix(out, []byte(clientPreface)))
	w.c.Sent(len(out))
	var lines []string
	for {
		f, err := w.ReadFrame()
		if err == io.EOF {
			return strings.Join(lines, "\n")
		}
		if err != nil {
			w.t.Fatalf("our frames are malformed: %v", err)
		}
		id, flags := f.Header().StreamID, f.Header().Flags
		end := ""
		if flags&1 != 0 && (f.Header().Type == oracle.FrameData || f.Header().Type == oracle.FrameHeaders) {
			end = " end"
		}
		switch f := f.(type) {
		case *oracle.HeadersFrame:
			block := bytes.Clone(f.HeaderBlockFragment())
			n := 0
			for ended := f.HeadersEnded(); !ended; n++ {
				next, err := w.ReadFrame()
				cf, ok := next.(*oracle.ContinuationFrame)
				if !ok || err != nil || cf.StreamID != id {
					w.t.Fatalf("%v %v where CONTINUATION should be", next, err)
				}
				block = append(block, cf.HeaderBlockFragment()...)
				ended = cf.HeadersEnded()
			}
			h, err := w.dec.DecodeFull(block)
			if err != nil {
				w.t.Fatalf("our field block is malformed: %v", err)
			}
			var b strings.Builder
			for _, f := range h {
				fmt.Fprintf(&b, " %s=%s", f.Name, f.Value)
			}
			if n > 0 {
				end += fmt.Sprintf(" in %d frames", n+1)
			}
			if b.Len() > 300 {
				b.Reset()
				fmt.Fprintf(&b, " %d fields", len(h))
			}
			lines = append(lines, fmt.Sprintf("HEADERS %d%s%s", id, b.String(), end))
		case *oracle.DataFrame:
			lines = append(lines, fmt.Sprintf("DATA %d %d%s", id, len(f.Data()), end))
		case *oracle.RSTStreamFrame:
			lines = append(lines, fmt.Sprintf("RST_STREAM %d %s", id, Code(f.ErrCode)))
		case *oracle.GoAwayFrame:
			lines = append(lines, fmt.Sprintf("GOAWAY %d %s", f.LastStreamID, Code(f.ErrCode)))
		case *oracle.WindowUpdateFrame:
			lines = append(lines, fmt.Sprintf("WINDOW_UPDATE %d %d", id, f.Increment))
		case *oracle.PingFrame:
			lines = append(lines, fmt.Sprintf("PING %x ack=%v", f.Data, f.IsAck()))
		case *oracle.SettingsFrame:
			line := fmt.Sprintf("SETTINGS ack=%v", f.IsAck())
			f.ForeachSetting(func(s oracle.Setting) error {
				line += fmt.Sprintf(" %d=%d", s.ID, s.Val)
				return nil
			})
			lines = append(lines, line)
		default:
			w.t.Fatalf("we sent %v", f)
		}
	}
}

// sends compares what the Conn wants to send.
func (w *wire) sends(want string) {
	w.t.Helper()
	if got := w.frames(); got != want {
		w.t.Errorf("sends\n%s\nwant\n%s", got, want)
	}
}

// balanced checks that no byte of the connection's receive window is lost:
// each is open to the peer, credited, or held by a stream.
func balanced(t testing.TB, c *Conn) {
	t.Helper()
	held := 0
	seen := map[*Stream]bool{}
	for _, e := range c.table.slots {
		if e.s != nil {
			held += e.s.held
			seen[e.s] = true
		}
	}
	for _, s := range c.ended {
		if seen[s] {
			t.Fatalf("stream %d is open and over", s.id)
		}
		held += s.held
	}
	under := 0
	if c.dataID != 0 { // counted against the window, not delivered yet
		under = c.dataLeft
	}
	if got := int(c.recvWin) + c.credit + held + under; got != c.cfg.ConnWindow {
		t.Fatalf("the connection's window lost %d bytes", c.cfg.ConnWindow-got)
	}
	if len(seen) != c.open || c.table.n != c.open {
		t.Fatalf("%d streams open, %d in the table (%d)", c.open, len(seen), c.table.n)
	}
}

// doomed is what the Handler is told when the connection fails with the streams
// that are open now.
func (w *wire) doomed(code string) string {
	var ids []uint32
	w.c.Each(func(s *Stream) { ids = append(ids, s.id) })
	slices.Sort(ids) // the oldest first
	var lines []string
	for _, id := range ids {
		lines = append(lines, fmt.Sprintf("%d reset %s", id, code))
	}
	return strings.Join(lines, "\n")
}
