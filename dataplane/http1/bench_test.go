package http1

import (
	"testing"

	"aether/dataplane/httpmsg"
)

// What a service-to-service call looks like: eight fields.
const typicalRequest = "GET /api/v1/items?limit=20 HTTP/1.1\r\n" +
	"Host: cart.shop.svc.cluster.local:8080\r\n" +
	"User-Agent: Go-http-client/1.1\r\n" +
	"Accept: application/json\r\n" +
	"Accept-Encoding: gzip\r\n" +
	"Authorization: Bearer 0123456789abcdef0123456789abcdef\r\n" +
	"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n" +
	"X-Request-Id: 8b7f3a1e-8f0e-4c5b-9d55-0d9a0c1c9f11\r\n" +
	"Connection: keep-alive\r\n\r\n"

const typicalResponse = "HTTP/1.1 200 OK\r\n" +
	"Content-Type: application/json\r\n" +
	"Content-Length: 512\r\n" +
	"Date: Mon, 02 Nov 2026 10:00:00 GMT\r\n" +
	"Server: app\r\n" +
	"Cache-Control: no-store\r\n" +
	"X-Request-Id: 8b7f3a1e-8f0e-4c5b-9d55-0d9a0c1c9f11\r\n\r\n"

func BenchmarkRequest(b *testing.B) {
	var p Parser
	var h httpmsg.Head
	raw, buf := []byte(typicalRequest), make([]byte, len(typicalRequest))
	b.ReportAllocs()
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		copy(buf, raw) // names are lowered in place
		if n, _, err := p.Request(buf, &h); n != len(raw) {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkResponse(b *testing.B) {
	var p Parser
	var h httpmsg.Head
	raw, buf := []byte(typicalResponse), make([]byte, len(typicalResponse))
	b.ReportAllocs()
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		copy(buf, raw)
		if n, _, err := p.Response(buf, &h, false); n != len(raw) {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkAppendRequest(b *testing.B) {
	h := mustRequest(b, typicalRequest)
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst = AppendRequest(dst[:0], h, RequestFraming(h))
	}
}

func BenchmarkAppendResponse(b *testing.B) {
	h := mustResponse(b, typicalResponse, false)
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst = AppendResponse(dst[:0], h, ResponseFraming(h, false, 1), ResponseOptions{Minor: 1})
	}
}

func BenchmarkChunkedBody(b *testing.B) {
	raw := AppendLast(AppendChunk(AppendChunk(nil, make([]byte, 16<<10)), make([]byte, 100)), nil)
	var r BodyReader
	b.ReportAllocs()
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		r.Start(Chunked, 0)
		for rest := raw; ; {
			_, used, done, err := r.Next(rest)
			if err != nil {
				b.Fatal(err)
			}
			if rest = rest[used:]; done {
				break
			}
		}
	}
}
