package replay

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"aether/sniff"
)

// endless is a capture that is made as it is read: connections that follow each other,
// thousands at a time, most of them well behaved.
type endless struct {
	left   int64 // bytes still to make
	r      *rand.Rand
	at     uint32 // seconds
	n      int    // connections made
	open   []made
	buf    bytes.Buffer
	frames int
	made   int // connections that closed
}

// made is a connection of an endless capture.
type made struct {
	client    netip.AddrPort
	seq, peer uint32
	sent      int
	kind      int
}

func newEndless(size int64) *endless {
	e := &endless{left: size, r: rand.New(rand.NewPCG(1, 1)), at: 1_700_000_000}
	head := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	head = append(head, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	head = binary.LittleEndian.AppendUint32(head, 65535)
	e.buf.Write(binary.LittleEndian.AppendUint32(head, 101))
	return e
}

func (e *endless) Read(p []byte) (int, error) {
	for e.buf.Len() < len(p) && e.left > 0 {
		e.step()
	}
	if e.buf.Len() == 0 {
		return 0, io.EOF
	}
	return e.buf.Read(p)
}

func (e *endless) frame(src, dst netip.AddrPort, seq, ack uint32, flags uint8, payload string) {
	b := packet(src, dst, seq, ack, flags, payload)
	if e.frames++; e.frames%100 == 0 {
		e.at++
	}
	var head [16]byte
	binary.LittleEndian.PutUint32(head[:], e.at)
	binary.LittleEndian.PutUint32(head[8:], uint32(len(b)))
	binary.LittleEndian.PutUint32(head[12:], uint32(len(b)))
	e.buf.Write(head[:])
	e.buf.Write(b)
	e.left -= int64(len(head) + len(b))
}

const (
	together = 4000
	kinds    = 4
)

// bulk is a segment as a card with segmentation offload hands it to a capture.
var bulk = strings.Repeat("b", 8000)

// step moves a connection on: it opens, asks, gets an answer, and ends or is never heard of again.
func (e *endless) step() {
	if len(e.open) < together {
		n := e.n
		e.n++
		c := made{
			client: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(n >> 16 & 0x7f), byte(n >> 8), byte(n)}), uint16(1024+n%60000)),
			seq:    e.r.Uint32(), peer: e.r.Uint32(), kind: n % kinds,
		}
		e.frame(c.client, cart, c.seq, 0, syn, "")
		e.frame(cart, c.client, c.peer, c.seq+1, syn|hasACK, "")
		e.open = append(e.open, c)
		return
	}
	i := e.r.IntN(len(e.open))
	c := &e.open[i]
	seq, peer := c.seq+1, c.peer+1
	gone := false
	switch c.sent++; {
	case c.kind == 0 && c.sent == 1: // a hole before all that it says
		e.frame(c.client, cart, seq+1, peer, hasACK, bulk)
	case c.kind == 0 && c.sent < 12:
		e.frame(c.client, cart, seq+1+uint32(c.sent*(len(bulk)+1)), peer, hasACK, bulk)
	case c.kind == 0:
		gone = true // without a word
	case c.sent == 1:
		e.frame(c.client, cart, seq, peer, hasACK, get)
	case c.sent < 12:
		e.frame(cart, c.client, peer+uint32((c.sent-2)*len(bulk)), seq+uint32(len(get)), hasACK, bulk)
	default:
		e.frame(cart, c.client, peer+10*uint32(len(bulk)), seq+uint32(len(get)), hasACK|fin, "")
		e.frame(c.client, cart, seq+uint32(len(get)), peer+10*uint32(len(bulk))+1, hasACK|fin, "")
		e.made++
		gone = true
	}
	if gone {
		e.open[i] = e.open[len(e.open)-1]
		e.open = e.open[:len(e.open)-1]
	}
}

// TestBigCapture: a capture of 1 GB, which is nowhere on a disk, is read in bounded
// memory; every connection of it is there once, with all its bytes.
func TestBigCapture(t *testing.T) {
	const size, mostLive = 1 << 30, 160 << 20
	e := newEndless(size)
	var flows, right int
	var most uint64
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before := m.HeapAlloc
	for f, err := range Read(e, Options{Heads: true}) {
		if err != nil {
			t.Fatal(err)
		}
		flows++
		switch {
		case f.Midstream:
			t.Fatalf("a connection in two parts: %+v", f)
		case f.Proto == sniff.HTTP11 && f.Host == "cart:8080" && f.ServerBytes == int64(10*len(bulk)) && string(f.Head) == get:
			right++
		}
		if flows%2000 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&m)
			most = max(most, m.HeapAlloc-min(before, m.HeapAlloc))
		}
	}
	t.Logf("%d MB in %d frames, %d flows, at most %d MB live", size>>20, e.frames, flows, most>>20)
	if flows != e.n || right < e.made {
		t.Errorf("%d flows, want %d; %d whole, want %d", flows, e.n, right, e.made)
	}
	if most == 0 || most > mostLive {
		t.Errorf("%d MB live, want at most %d", most>>20, mostLive>>20)
	}
}

func ExampleRead() {
	capture := newEndless(2000)
	for f, err := range Read(capture, Options{}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(f.Frame, f.Server, f.Proto)
		break
	}
	// Output: 1 10.96.0.10:8080 none
}
