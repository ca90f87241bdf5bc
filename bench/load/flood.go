package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Flood is what flood did.
type Flood struct {
	Connections int64 `json:"connections"` // open at the end
	Dialled     int64 `json:"dialled"`     // in all: those that were cut off come again
	Requests    int64 `json:"requests"`    // answered, HTTP/1
	Streams     int64 `json:"streams"`     // answered, HTTP/2
	Heads       int64 `json:"heads"`       // field lines of heads without an end
}

const (
	floodRequests = 24  // one connection in so many asks as fast as it is answered
	floodStreams  = 120 // and one in so many has floodWindow HTTP/2 streams under way all the time
	floodWindow   = 20
	floodEvery    = time.Second // the others send a further field of a head that never ends
)

// flood holds n connections to one address and is as much of a nuisance on them as it can. It
// writes a line once all are open, and ends when stop does.
func flood(to netip.AddrPort, host string, n int, stop io.Reader, said io.Writer) error {
	var f Flood
	over := make(chan struct{})
	var opened, all sync.WaitGroup
	opened.Add(n)
	slots := make(chan struct{}, 64) // connects under way
	for i := range n {
		all.Go(func() {
			once := sync.OnceFunc(opened.Done)
			for {
				select {
				case <-over:
					once()
					return
				case slots <- struct{}{}:
				}
				c, err := net.DialTimeout("tcp", to.String(), 10*time.Second)
				<-slots
				if err != nil {
					continue
				}
				atomic.AddInt64(&f.Dialled, 1)
				atomic.AddInt64(&f.Connections, 1)
				once()
				done := make(chan struct{})
				go func() {
					select {
					case <-over:
					case <-done:
					}
					c.Close()
				}()
				switch {
				case i%floodStreams == 1:
					f.streams(c, host)
				case i%floodRequests == 0:
					f.requests(c, host)
				default:
					f.heads(c, host, over)
				}
				close(done)
				select {
				case <-over:
					return
				default:
					atomic.AddInt64(&f.Connections, -1)
				}
			}
		})
	}
	opened.Wait()
	fmt.Fprintf(said, "{\"open\":%d}\n", n)
	_, _ = io.Copy(io.Discard, stop)
	close(over)
	all.Wait()
	return json.NewEncoder(said).Encode(&f)
}

func (f *Flood) requests(c net.Conn, host string) {
	ask := []byte("GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n")
	buf := make([]byte, 4096)
	have := 0
	if _, err := c.Write(ask); err != nil {
		return
	}
	for {
		n, err := c.Read(buf[have:])
		if err != nil {
			return
		}
		have += n
		k, err := answer(buf[:have])
		if err != nil {
			return
		}
		if k == 0 {
			continue
		}
		have = copy(buf, buf[k:have])
		atomic.AddInt64(&f.Requests, 1)
		if _, err := c.Write(ask); err != nil {
			return
		}
	}
}

func (f *Flood) streams(c net.Conn, host string) {
	var out, block bytes.Buffer
	fr := http2.NewFramer(&out, bufio.NewReader(c))
	enc := hpack.NewEncoder(&block)
	id := uint32(1)
	ask := func() {
		block.Reset()
		for _, kv := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":path", "/"}, {":authority", host}} {
			_ = enc.WriteField(hpack.HeaderField{Name: kv[0], Value: kv[1]})
		}
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndStream: true, EndHeaders: true})
		id += 2
	}
	out.WriteString(http2.ClientPreface)
	_ = fr.WriteSettings()
	for range floodWindow {
		ask()
	}
	for {
		if out.Len() > 0 {
			if _, err := c.Write(out.Bytes()); err != nil {
				return
			}
			out.Reset()
		}
		frame, err := fr.ReadFrame()
		if err != nil {
			return
		}
		switch g := frame.(type) {
		case *http2.SettingsFrame:
			if !g.IsAck() {
				_ = fr.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !g.IsAck() {
				_ = fr.WritePing(true, g.Data)
			}
		case *http2.DataFrame:
			if n := len(g.Data()); n > 0 {
				_ = fr.WriteWindowUpdate(0, uint32(n))
			}
		case *http2.GoAwayFrame:
			return
		}
		if h := frame.Header(); h.StreamID != 0 && (h.Type == http2.FrameRSTStream || h.Flags&http2.FlagDataEndStream != 0) {
			atomic.AddInt64(&f.Streams, 1)
			ask()
		}
	}
}

func (f *Flood) heads(c net.Conn, host string, over <-chan struct{}) {
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\n"); err != nil {
		return
	}
	field := []byte("X-More: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n")
	tick := time.NewTicker(floodEvery)
	defer tick.Stop()
	for {
		select {
		case <-over:
			return
		case <-tick.C:
		}
		if _, err := c.Write(field); err != nil {
			return
		}
		atomic.AddInt64(&f.Heads, 1)
	}
}
