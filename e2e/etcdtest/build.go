package etcdtest

import "aether/e2e/tool"

// Tool is etcd's binary.
var Tool = tool.Etcd
