package etcdtest

import "aether/e2e/tool"

// Tool is etcd's binary.
var Tool = tool.Tool{
	Name: "etcd", Env: "AETHER_ETCD", Module: "e2e/etcdtest/testdata/etcd", Package: "go.etcd.io/etcd/server/v3",
}
